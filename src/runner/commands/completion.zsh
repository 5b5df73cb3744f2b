#compdef runner
_runner() {
  local -a found
  found=("${(@f)$(command runner completion words -- "${(@)words[2,CURRENT]}" 2> /dev/null)}")
  if [[ -n $found ]]; then compadd -a found; else _files; fi
}
# the first call of an autoloaded file completes too
if [[ $funcstack[1] == _runner ]]; then _runner "$@"; else compdef _runner runner; fi
