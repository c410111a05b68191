# Completion of labkit for bash. Nothing that is read here is evaluated: values are quoted before they reach the line.
_labkit() {
    local line value quoted word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    while IFS= read -r line; do
        value=${line%%$'\t'*}
        if [[ $word == [\"\']* ]]; then
            # Behind an open quote bash inserts a value as it is.
            [[ $value == *[\"\'\`\$\\!]* ]] || COMPREPLY+=("$value")
        else
            printf -v quoted '%q' "$value"
            COMPREPLY+=("$quoted")
        fi
    done < <(_LABKIT_COMPLETE_LINE=${COMP_LINE:0:COMP_POINT} "$1" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace
    fi
}
complete -o default -F _labkit labkit
