_runner() {
  local line=${COMP_LINE:0:COMP_POINT} words found
  read -ra words <<< "$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  mapfile -t found < <("$1" completion words -- "${words[@]:1}" 2> /dev/null)
  # bash replaces only what follows the `=`
  [[ ${words[-1]} == --*=* && $COMP_WORDBREAKS == *=* ]] && found=("${found[@]#*=}")
  COMPREPLY=("${found[@]}")
}
complete -o default -F _runner runner
