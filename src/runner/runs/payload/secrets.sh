# shellcheck shell=bash
# read_secrets: the user's tokens, from a file that only the user can read, become variables of the step. Their values stand
# in no script, command line or record of a run. What is exported already counts. `NAME=!COMMAND` asks a keyring or the like.
secret_names=()
read_secrets() {
    local file=${RUNNER_SECRETS:-${XDG_CONFIG_HOME:-${HOME:-/}/.config}/runner/secrets} name line value
    [ -e "$file" ] || return 0
    case $(stat -L -c %a "$file") in
    *00) ;;
    *)
        say "not read: $file, since others can read it; chmod 600 it"
        return
        ;;
    esac
    while IFS= read -r line || [ -n "$line" ]; do
        name=${line%%=*}
        [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || continue
        [ -z "${!name:-}" ] || continue
        value=${line#*=}
        if [[ $value == '!'* ]] && ! value=$(timeout 10 bash -c "${value:1}" </dev/null 2>/dev/null); then
            say "not read: $name, since its command in $file failed"
            continue
        fi
        case $name in
        RUNNER_*) printf -v "$name" %s "$value" ;; # ours: the step needs none of them
        *)
            export "$name=$value"
            secret_names+=("$name")
            ;;
        esac
    done <"$file"
}
