# shellcheck shell=bash disable=SC2016,SC2034  # references are compared as text; the tables are read by the callers
# What sandbox.sh and container.sh share: errors, references to variables, and the variables inside a container.
# Precedence: EDF [env] over image over host.

fail() { # WHAT BECAUSE TRY
  printf 'runner: %s\n  because: %s\n  try:     %s\n' "$1" "$2" "$3" >&2
  exit 1
}

# own_folder FOLDER: makes a folder that only this user can enter. /tmp is everybody's: a folder of another user, or one
# that others could write to, may hold anything under names that are easy to guess, and is refused.
own_folder() {
  local mode=777
  mkdir -m 700 -- "$1" 2> /dev/null || [[ -e $1 || -L $1 ]] ||
    fail "cannot create the folder $1 on $(uname -n)" "${1%/*} does not exist, is full, or is not writable" \
      "set TMPDIR to a local folder"
  if [[ -d $1 && ! -L $1 && -O $1 ]]; then mode=$(stat -c %a -- "$1"); fi
  (((8#$mode & 8#022) == 0)) ||
    fail "$1 on $(uname -n) is not a private folder of this user" "another user created it, or may write to it" \
      "set TMPDIR to a folder of your own, and tell the admin if another user created it; if it is yours: rm -r $1"
  chmod 700 -- "$1"
}

# expand TABLE TEXT WHAT: puts TEXT with ${VAR} and ${VAR:-default} replaced from the associative array TABLE into REPLY.
# $${VAR} is the literal text ${VAR}.
expand() {
  local -n table=$1
  local rest=$2 what=$3 out='' before name inner default
  while [[ $rest == *'${'* ]]; do
    before=${rest%%'${'*}
    rest=${rest#*'${'}
    if [[ $before == *'$' ]]; then
      out+="${before%'$'}"'${'
      continue
    fi
    inner=${rest%%'}'*}
    rest=${rest#*'}'}
    default=${inner#*:-}
    while [[ ${default//'${'/} != "$default" && $(count "$inner" '${') -gt $(count "$inner" '}') ]]; do
      inner+="}${rest%%'}'*}" # the brace closed a reference inside of the default
      rest=${rest#*'}'}
      default=${inner#*:-}
    done
    name=${inner%%:-*}
    out+=$before
    if [[ -n ${table[$name]+set} && (-n ${table[$name]} || $inner != *:-*) ]]; then
      out+=${table[$name]}
    elif [[ $inner == *:-* ]]; then
      expand "$1" "$default" "$what"
      out+=$REPLY
    else
      fail "the variable $name in $what is not defined" "$what contains \${$name}, but $name is not set on this node" \
        "export $name=… before the job is started, or give it a default: \${$name:-…}"
    fi
  done
  REPLY=$out$rest
}

# count TEXT PART: prints how often PART occurs in TEXT.
count() {
  local without=${1//"$2"/}
  printf '%s' $(((${#1} - ${#without}) / ${#2}))
}

# The variables of the host that do not enter a container; pyxis keeps the same ones out.
kept_out() {
  case $1 in
    PATH | LD_LIBRARY_PATH | LD_PRELOAD | LANG | LANGUAGE | LC_ALL | BASH_FUNC_* | BASH_ENV | CONTAINERS_* | _CONTAINERS_* | SHLVL | PWD | OLDPWD | _) return 0 ;;
    *) return 1 ;;
  esac
}

declare -A host=() inside=() dropped=()
declare -a final=()

# read_host: fills `host` (for paths of mounts) and `inside` (what enters the container) from our own environment.
read_host() {
  local entry
  while IFS= read -r -d '' entry; do
    [[ $entry == *=* && -n ${entry%%=*} ]] || continue
    host[${entry%%=*}]=${entry#*=}
    kept_out "${entry%%=*}" || inside[${entry%%=*}]=${entry#*=}
  done < /proc/self/environ
}

# read_image FILE: lays the image's variables (lines of NAME=VALUE, as enroot writes /etc/environment) over `inside`.
read_image() {
  local line name value
  [[ -r $1 ]] || return 0
  while IFS= read -r line || [[ -n $line ]]; do
    [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= && $line != ENROOT_* ]] || continue
    name=${line%%=*} value=${line#*=}
    if [[ $value =~ ^\"(.*)\"$ || $value =~ ^\'(.*)\'$ ]]; then value=${BASH_REMATCH[1]}; fi
    inside[$name]=$value
  done < "$1"
}

# read_edf: lays [env] of the EDF over `inside`. No entry sees another one, nor does `workdir`, which is expanded here; an
# empty value unsets.
read_edf() {
  local index values=()
  [[ -n ${inside[PATH]-} ]] || inside[PATH]=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  if [[ -n $workdir ]]; then
    expand inside "$workdir" workdir
    workdir=$REPLY
  fi
  for ((index = 0; index < ${#env[@]}; index += 2)); do
    expand inside "${env[index + 1]}" "env.${env[index]}"
    values[index]=$REPLY
  done
  for ((index = 0; index < ${#env[@]}; index += 2)); do
    inside[${env[index]}]=${values[index]}
    [[ -n ${env[index + 1]} ]] || dropped[${env[index]}]=1
  done
}

# list_inside: fills the array `final` with NAME=VALUE of every variable inside of the container.
list_inside() {
  local name
  for name in "${!inside[@]}"; do
    [[ -n ${dropped[$name]-} ]] || final+=("$name=${inside[$name]}")
  done
}

# absolute PATH: puts a path that is relative to the folder of the caller into REPLY as an absolute one.
absolute() {
  case $1 in
    /*) REPLY=$1 ;;
    *) REPLY=$PWD/${1#./} ;;
  esac
}

# steady COMMAND…: runs it deaf to the signals that Slurm sends to every process of a step: a file system that ended would
# take the files away from those who are still saving. libfuse leaves ignored signals ignored.
steady() (
  deaf
  exec "$@"
)
deaf() { trap '' HUP INT TERM USR1 USR2; }
