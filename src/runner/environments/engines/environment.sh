# shellcheck shell=bash disable=SC2016,SC2034  # references are compared as text; the callers read the tables
# Functions for sandbox.sh and container.sh: errors, references to variables, and the variables inside a container.
# Variables of the EDF's [env] override the image's, which override the host's.

fail() { # WHAT BECAUSE TRY
  printf 'runner: %s\n  because: %s\n  try:     %s\n' "$1" "$2" "$3" >&2
  exit 1
}

# own_folder FOLDER: creates a folder that only this user can enter. Fails if it exists and belongs to another user, or if
# others can write to it, because in /tmp anyone can create a folder with an easily guessed name.
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

# expand TABLE TEXT WHAT: sets REPLY to TEXT with ${VAR} and ${VAR:-default} replaced from the associative array TABLE.
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
      inner+="}${rest%%'}'*}" # this brace closes a reference inside the default
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

# Variables of the host that are not passed into the container, as with pyxis. RUNNER_TRACE would record what is started
# there, too.
kept_out() {
  case $1 in
    PATH | LD_LIBRARY_PATH | LD_PRELOAD | LANG | LANGUAGE | LC_ALL | BASH_FUNC_* | BASH_ENV | CONTAINERS_* | _CONTAINERS_* | SHLVL | PWD | OLDPWD | RUNNER_TRACE | _) return 0 ;;
    *) return 1 ;;
  esac
}

declare -A host=() inside=() dropped=()
declare -a final=()

# read_host: fills `host` (for paths of mounts) and `inside` (variables for the container) from this environment.
read_host() {
  local entry
  while IFS= read -r -d '' entry; do
    [[ $entry == *=* && -n ${entry%%=*} ]] || continue
    host[${entry%%=*}]=${entry#*=}
    kept_out "${entry%%=*}" || inside[${entry%%=*}]=${entry#*=}
  done < /proc/self/environ
}

# read_image FILE: adds the image's variables to `inside`, from lines NAME=VALUE as enroot writes them to /etc/environment.
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

# read_edf: adds [env] of the EDF to `inside`, and expands `workdir`. Neither the entries nor `workdir` see other entries.
# An empty value unsets a variable.
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

# may_be_secret NAME VALUE: by the name, or a password in a URL, as in payload/batch.sh.
may_be_secret() {
  [[ ${1^^} =~ TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|WEBHOOK|_PWD$|(^|_)(PAT|DSN)$ || $2 =~ ://[^/@]*:[^/@]*@ ]]
}

# list_inside: fills the array `final` with the words of `env` that leave exactly the variables inside the container. Every
# user of the node can read command lines: what may be a secret is exported instead.
list_inside() {
  local name
  local -A outside=([_]=1)
  for name in "${!host[@]}" $(compgen -e); do outside[$name]=1; done
  for name in "${!inside[@]}"; do
    if [[ -n ${dropped[$name]-} ]]; then
      continue
    elif [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] && may_be_secret "$name" "${inside[$name]}"; then
      export "$name=${inside[$name]}"
      unset "outside[$name]"
    else
      final+=("$name=${inside[$name]}")
    fi
  done
  for name in "${!outside[@]}"; do final=(-u "$name" "${final[@]}"); done
}

# absolute PATH: sets REPLY to the absolute path. A relative PATH is relative to the caller's folder.
absolute() {
  case $1 in
    /*) REPLY=$1 ;;
    *) REPLY=$PWD/${1#./} ;;
  esac
}

# steady COMMAND…: runs a command that ignores the signals that Slurm sends to every process of a step. Otherwise, a FUSE
# file system would end while programs are still saving. libfuse does not handle signals that are already ignored.
steady() (
  deaf
  exec "$@"
)
deaf() { trap '' HUP INT TERM USR1 USR2; }
