# shellcheck shell=bash
# read_secrets: the user's tokens, from a file that only the user can read, become variables of the step. Their values stand
# in no script, command line or record of a run. A variable that is already exported wins. `NAME=!COMMAND` asks a keyring.
secret_names=() # all variables whose values no message may hold
read_names=()   # those that the next job reads from the file again
read_secrets() {
    local name
    mapfile -t secret_names < <(compgen -e | while read -r name; do ! looks_secret "$name" || printf '%s\n' "$name"; done)
    read_secrets_file
}

# Whether a variable looks like a secret: the same names as runner's own detector (machine/secrets.py). A short value, a
# number or a path is none.
looks_secret() {
    local name=${1,,} value=${!1:-}
    [[ $name =~ (^|_)(token|secret|passwd|password|passphrase|credentials?|api_?key|access_?key|private_?key|auth|key|webhook)s?$ ]] || return 1
    [[ ! $name =~ (max|min|num|n|pad|eos|bos|new|sort|group|primary|foreign|per|gpg)_?(tokens?|keys?)$ ]] || return 1
    [[ ${#value} -ge 8 && $value != [/~]* && $value != ./* && $value == *[!0-9]* ]]
}

# The text with (secret) in the place of every secret's value, the longest first: one may begin with another.
masked() {
    local text=$1 name value
    while read -r _ name; do
        text=${text//"${!name}"/(secret)}
    done < <(
        for name in "${secret_names[@]+"${secret_names[@]}"}" RUNNER_WEBHOOK; do
            value=${!name:-}
            [ -z "$value" ] || printf '%s %s\n' "${#value}" "$name"
        done | sort -rn
    )
    printf '%s' "$text"
}

read_secrets_file() {
    local file=${RUNNER_SECRETS:-${XDG_CONFIG_HOME:-${HOME:-/}/.config}/runner/secrets} name line value
    [ -e "$file" ] || return 0
    case $(stat -L -c %a "$file") in
    *00) ;;
    *)
        say "not read: $file, since others can read it; try: chmod 600 $file"
        return
        ;;
    esac
    while IFS= read -r line || [ -n "$line" ]; do
        name=${line%%=*}
        [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || continue
        secret_names+=("$name")
        value=${line#*=}
        if [ -n "${!name:-}" ]; then # the next job reads the same value
            [ "${!name}" != "$value" ] || read_names+=("$name")
            continue
        fi
        if [[ $value == '!'* ]] && ! value=$(timeout 10 bash -c "${value:1}" </dev/null 2>/dev/null); then
            say "not read: $name, since its command in $file failed"
            continue
        fi
        case $name in
        RUNNER_*) printf -v "$name" %s "$value" ;; # ours: the step needs none of them
        *)
            export "$name=$value"
            read_names+=("$name")
            ;;
        esac
    done <"$file"
}
