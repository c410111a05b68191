# Completion of labkit for fish. Nothing that is read here is evaluated: fish quotes what it inserts.
function __labkit_answers
    set -l words (commandline --current-process --tokenize --cut-at-cursor)
    set -lx _LABKIT_COMPLETE_LINE (commandline --current-process --cut-at-cursor | string collect)
    command $words[1] 2>/dev/null
end
complete --command labkit --no-files --arguments '$__labkit_found' \
    --condition 'set -g __labkit_found (__labkit_answers); count $__labkit_found >/dev/null'
