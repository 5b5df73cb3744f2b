# shellcheck shell=bash
# read_secrets: export the user's secrets for the step. They come from a file that only the user can read, so that their values
# appear in no script, command line or run folder. A variable that is already exported keeps its value. For a line
# NAME=!COMMAND, the value is the output of the command, such as a query to a keyring.
masked_names=() # variables whose values must not appear in messages
read_names=()   # variables from the file; the next job reads them again
read_secrets() {
    local name
    mapfile -t masked_names < <(compgen -e | while read -r name; do ! looks_secret "$name" || printf '%s\n' "$name"; done)
    read_secrets_file
    read_logins
}

# read_logins: export the logins of the Hugging Face hub and of Weights & Biases that are in the user's home folder, because a
# container often does not see this folder. A variable that is set keeps its value, even if the value is empty.
read_logins() {
    local cache=${XDG_CACHE_HOME:-${HOME:-/}/.cache} host=${WANDB_BASE_URL:-https://api.wandb.ai} name value
    host=${host#*://} host=${host%%[:/]*}
    for name in HF_TOKEN WANDB_API_KEY; do
        [ -z "${!name+set}" ] || continue
        case $name in
        HF_TOKEN) value=$(cat "${HF_TOKEN_PATH:-${HF_HOME:-$cache/huggingface}/token}") ;;
        *) value=$(awk -v host="$host" '{ gsub(/\r/, ""); for (i = 1; i <= NF; i++) {
                if (last == "machine") here = $i == host
                if (last == "password" && here) { print $i; exit }
                last = $i } }' "${NETRC:-${HOME:-/}/.netrc}") ;;
        esac 2>/dev/null || continue
        value=${value//[[:space:]]/} # no token has any; the file may have Windows line endings
        [ -n "$value" ] || continue
        export "$name=$value"
        masked_names+=("$name") read_names+=("$name")
    done
}

# looks_secret NAME: succeed if the variable looks like a secret, by the same rules as runner/machine/secrets.py. A value that
# is short, a number or a path is not a secret.
looks_secret() {
    local name=${1,,} value=${!1:-}
    [[ $name =~ (^|_)(token|secret|passwd|password|passphrase|credentials?|api_?key|access_?key|private_?key|auth|key|webhook)s?$ ]] || return 1
    [[ ! $name =~ (max|min|num|n|pad|eos|bos|new|sort|group|primary|foreign|per|gpg)_?(tokens?|keys?)$ ]] || return 1
    [[ ${#value} -ge 8 && $value != [/~]* && $value != ./* && $value == *[!0-9]* ]]
}

# masked TEXT: print the text with every secret replaced by (secret). Longer values are replaced first, because one secret may
# be the beginning of another.
masked() {
    local text=$1 name value
    while read -r _ name; do
        text=${text//"${!name}"/(secret)}
    done < <(
        for name in "${masked_names[@]+"${masked_names[@]}"}" RUNNER_WEBHOOK; do
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
        say "not reading $file, because other users can read it; try: chmod 600 $file"
        return
        ;;
    esac
    while IFS= read -r line || [ -n "$line" ]; do
        line=${line%$'\r'} # the file may have Windows line endings
        name=${line%%=*}
        [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || continue
        masked_names+=("$name")
        value=${line#*=}
        if [ -n "${!name:-}" ]; then # exported already; if the value is the same, the next job can read it from the file
            [ "${!name}" != "$value" ] || read_names+=("$name")
            continue
        fi
        if [[ $value == '!'* ]] && ! value=$(timeout 10 bash -c "${value:1}" </dev/null 2>/dev/null); then
            say "not reading $name, because its command in $file failed, or took longer than 10 s"
            continue
        fi
        case $name in
        RUNNER_*) printf -v "$name" %s "$value" ;; # used by this script only, so not exported to the step
        *)
            export "$name=$value"
            read_names+=("$name")
            ;;
        esac
    done <"$file"
}
