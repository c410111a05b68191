#compdef labkit
# Completion of labkit for zsh. Nothing that is read here is evaluated: compadd quotes what it inserts.
_labkit() {
    local line
    local -a values shown folders
    while IFS= read -r line; do
        if [[ ${line%%$'\t'*} == */ ]]; then
            folders+=("${line%%$'\t'*}")
        else
            values+=("${line%%$'\t'*}")
            shown+=("${line/$'\t'/  -- }")
        fi
    done < <(_LABKIT_COMPLETE_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" "${(Q)words[1]}" 2>/dev/null)
    [[ $PREFIX == --*=* ]] && compset -P '*='
    (( $#values )) && compadd -l -d shown -a values
    (( $#folders )) && compadd -S '' -a folders
    (( $#values + $#folders )) || _files
}
if [[ $funcstack[1] == _labkit ]]; then
    _labkit "$@"
else
    compdef _labkit labkit
fi
