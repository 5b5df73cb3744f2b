# shellcheck shell=bash
# Functions of the batch script, on the host. They find the newest checkpoint of a run, and tell whether a checkpoint is
# complete. The file `trainers` of the run folder has the names of each trainer's checkpoints, and the files that they need.
# All of these functions must run in the run folder.

# Succeed if the training program marks complete checkpoints with complete.json, as the programs in jobs/ do.
marks_checkpoints() { compgen -G 'checkpoints/*/complete.json' >/dev/null; }

# Print the step of the newest complete checkpoint, or 0. With `known`, look only at checkpoints whose names are in `trainers`.
newest_complete() {
    local step
    read -r step _ < <(newest_of_generation "$@")
    printf '%s' "$step"
}

# The same, and the generation: print STEP GENERATION, or 0 0.
newest_of_generation() {
    local generation number path
    while read -r generation number path; do
        [ "${1:-}" != known ] || [ "$(rules_of "$path")" != none ] || continue
        if complete_checkpoint "$path"; then
            printf '%s %s' "$number" "$generation"
            return
        fi
    done < <(checkpoint_candidates)
    printf '0 0'
}

# Print GENERATION STEP PATH of everything that is named like a checkpoint: in checkpoints/, in the folders of the trainer's
# arguments, and in those that the trainer printed (attempts/N/saved). The newest one comes first: of the highest generation, the
# highest step, as in jobs/training/resume.py.
checkpoint_candidates() {
    local path number
    found_checkpoints | sort -u | while IFS= read -r path; do
        number=$(step_of "$path")
        [ -z "$number" ] || printf '%s %s %s\n' "$(generation_of "$path")" "$((10#$number))" "$path"
    done | sort -k 1,1nr -k 2,2nr
}

# generation_of PATH: print what complete.json says, or 0. A training that begins again in a folder with later steps increases it.
generation_of() {
    local found=''
    [ ! -e "$1/complete.json" ] || found=$(sed -n 's/.*"generation": *\([0-9]\{1,6\}\).*/\1/p' "$1/complete.json" 2>/dev/null)
    printf '%s' "$((10#${found:-0}))"
}

# saved_unnumbered NUMBER: succeed if a whole checkpoint file without a number in its name was written after the start of attempt
# NUMBER. Many trainers overwrite one file, such as last.pt.
saved_unnumbered() {
    local file
    while IFS= read -r file; do
        ! whole "$file" || return 0
    done < <(find -L checkpoints -maxdepth 3 -type f -newer "attempts/$1/started" \
        -regex '.*/[^/0-9]*\.\(pt\|pth\|tar\|ckpt\|npz\|safetensors\|h5\|keras\|pdparams\)' 2>/dev/null | head -n 20)
    return 1
}

# list_checkpoints N: print STATE STEP PATH of the newest N checkpoints; STATE is `complete` or `incomplete`.
list_checkpoints() {
    local number path state
    checkpoint_candidates | head -n "$1" | while read -r _ number path; do
        if complete_checkpoint "$path"; then state=complete; else state=incomplete; fi
        printf '%s %s %s\n' "$state" "$number" "$path"
    done
}

found_checkpoints() {
    local folder name names
    mapfile -t names < <(sed -n 's/^checkpoint_name //p' trainers 2>/dev/null | sort -u)
    compgen -G 'checkpoints/*' | grep -v -E '(\.json|\.txt|\.log|\.yaml|_rank[0-9]+\.pt)$'
    {
        echo checkpoints
        sed -n 's/^checkpoint_folder //p' trainers 2>/dev/null | while IFS= read -r folder; do
            in_program_folder "$folder"
        done
        saved_checkpoints | cut -d ' ' -f 2- | sed 'p; s#/[^/]*$##'
    } | sort -u | while IFS= read -r folder; do
        for name in ${names[@]+"${names[@]%/}"}; do
            compgen -G "$folder/$name"
            compgen -G "$folder/*/$name"
        done
    done
}

# Print STEP PATH for each checkpoint that the trainer printed.
saved_checkpoints() {
    local number path
    cat attempts/*/saved 2>/dev/null | while read -r number path; do
        printf '%s %s\n' "$number" "$(in_program_folder "$path")"
    done
}

# in_program_folder PATH: print the path. {run} is the run folder, and a relative path begins at the program's working folder.
in_program_folder() {
    case $1 in
    '{run}/'*) printf '%s\n' "${1#*/}" ;;
    /*) printf '%s\n' "$1" ;;
    *) printf '%s\n' "${program_folder:-code}/$1" ;;
    esac
}

# step_of PATH: print the step of a checkpoint: the number after `step=` or `epoch=`, or at the end of the name, before a rank. A
# metric such as 0.32 is none. For a file with no number in its name, the trainer printed the step.
step_of() {
    local name=${1##*/}
    if [[ $name =~ step=([0-9]+) || $name =~ epoch=([0-9]+) ]]; then
        printf '%s' "${BASH_REMATCH[1]}"
        return
    fi
    [ -d "$1" ] || name=${name%.*}
    [[ ! $name =~ ^(.*)[-_.]rank[-_]?[0-9]+$ ]] || name=${BASH_REMATCH[1]}
    [[ ! $name =~ [0-9]\.[0-9]+$ ]] || return
    name=${name##*[!0-9]}
    if [ -n "$name" ] || [ -d "$1" ]; then
        printf '%s' "$name"
        return
    fi
    saved_checkpoints | while read -r number path; do
        if [ "$path" = "$1" ] || [ "$path" = "${1%/*}" ]; then printf '%s\n' "$number"; fi
    done | sort -n | tail -n 1
}

# complete_checkpoint PATH: succeed if a program can resume from this file or folder: it has the files that its trainer needs,
# and none is cut off.
complete_checkpoint() {
    case ${1##*/} in *.tmp | *.partial | *.incomplete | tmp-* | *[._-]tmp[._-]*) return 1 ;; esac
    case $1 in
    */tmp-checkpoint-*/*) return 1 ;;
    */checkpoint-*/global_step*) [ "$(step_of "$1")" != "$(step_of "${1%/*}")" ] || return 1 ;; # a part of checkpoint-N
    */checkpoint-*) if marks_checkpoints; then [ -e "$1/complete.json" ] && return; fi ;;
    esac
    [ "$(rules_of "$1")" != broken ] && deepspeed_parts "$1" && whole "$1"
}

# deepspeed_parts PATH: succeed if the folder of another trainer, such as Hugging Face's, has no parts of DeepSpeed, or all that
# DeepSpeed needs: `latest` names a folder that is there. It has the model, and with ZeRO the optimizer.
deepspeed_parts() {
    local tag=''
    [ -e "$1/latest" ] || [ -e "$1/zero_to_fp32.py" ] || compgen -G "$1/global_step[0-9]*/" >/dev/null || return 0
    read -r tag _ 2>/dev/null <"$1/latest"
    [ -n "$tag" ] && compgen -G "$1/$tag/*_model_states.pt" >/dev/null || return 1
    [ -e "$1/zero_to_fp32.py" ] || compgen -G "$1/$tag/zero_pp_rank_*_model_states.pt" >/dev/null || return 0
    compgen -G "$1/$tag/*_optim_states.pt" >/dev/null
}

# rules_of PATH: print `kept` if a trainer has checkpoints of that name and the needed files are there, `broken` if they are
# not, and `none` if no trainer has checkpoints of that name.
rules_of() {
    local name=${1##*/} number key value state=none now=
    number=$(step_of "$1")
    while read -r key value; do
        case $key in
        checkpoint_name)
            [ "$now" != kept ] || break
            now=
            [ ! -d "$1" ] || value=${value%/}
            # shellcheck disable=SC2254 # a pattern
            case $name in $value) state=broken now=kept ;; esac
            ;;
        checkpoint_needs) [ -z "$now" ] || has_file "$1" "${value//\{step\}/$(written "$name")}" || now= ;;
        checkpoint_tracker) [ -z "$now" ] || tracked "$1" "$value" "${number:-0}" || now= ;;
        esac
    done < <(grep -E '^checkpoint_(name|needs|tracker) ' trainers 2>/dev/null)
    printf '%s' "${now:-$state}"
}

# written NAME: print the number at the end of NAME as it is written there, with its zeros.
written() {
    local name=${1%.*}
    printf '%s' "${name##*[!0-9]}"
}

# has_file PATH PATTERN|PATTERN…: succeed if the folder PATH has such a file. If PATH is a file, such a file must be beside it,
# and whole.
has_file() {
    local file
    if [ -d "$1" ]; then
        compgen -G "$1/${2%%|*}" >/dev/null || { [[ $2 == *"|"* ]] && has_file "$1" "${2#*|}"; }
    else
        file=$(compgen -G "${1%/*}/$2") && whole "$file"
    fi
}

# tracked PATH FILE STEP: succeed if FILE, beside the checkpoint, names this step or a later one.
tracked() {
    local text=''
    read -r text _ 2>/dev/null <"${1%/*}/$2"
    text=${text##*[!0-9]}
    [ -n "$text" ] && ((10#$text >= 10#$3))
}

# whole PATH: succeed if no file of the folder, or not this file, is cut off. Of many files, only some are opened: Slurm kills a
# job 30 s after TERM.
whole() {
    local file list=() zips=() tensors=()
    mapfile -t list < <(find -L "$1" -type f 2>/dev/null)
    [ "${#list[@]}" -gt 0 ] || return 1
    for file in "${list[@]}"; do
        case $file in
        *.tmp | *.partial | *.incomplete) return 1 ;;
        *.pt | *.pth | *.bin | *.ckpt | *.distcp | *.npz) zips+=("$file") ;;
        *.safetensors) tensors+=("$file") ;;
        *.json) whole_json "$file" || return 1 ;;
        */.metadata) whole_pickle "$file" || return 1 ;;
        *) [ -s "$file" ] || [ "${#list[@]}" -gt 1 ] || return 1 ;;
        esac
        case $file in
        *.index.json) all_present "$file" '"[^"]+\.(safetensors|bin)"' || return 1 ;;
        */.metadata) all_present "$file" '__[0-9]+_[0-9]+\.distcp' || return 1 ;;
        *.distcp) [ -e "${file%/*}/.metadata" ] || return 1 ;;
        esac
    done
    [ "${#zips[@]}" = 0 ] || whole_zips "${zips[@]:0:500}" || return 1
    for file in ${tensors[@]+"${tensors[@]:0:100}"}; do
        whole_safetensors "$file" || return 1
    done
}

# all_present FILE PATTERN: succeed if all files whose names are in FILE are beside it.
all_present() {
    local name
    while IFS= read -r name; do
        [ -e "${1%/*}/$name" ] || return 1
    done < <(grep -a -o -E "$2" "$1" | tr -d '"' | sort -u)
}

# whole_zips FILE…: torch.save writes a zip archive, whose last 22 bytes begin with PK 5 6. Of files in other formats, only
# those that are almost empty or begin with zeros are refused.
whole_zips() {
    local size
    while read -r size; do ((size >= 22)) || return 1; done < <(stat -L -c %s "$@")
    { head -q -c 4 "$@" && tail -q -c 22 "$@"; } | od -An -v -tu1 | LC_ALL=C awk -v files="$#" '
        { for (i = 1; i <= NF; i++) byte[++bytes] = $i }
        END {
            if (bytes != 26 * files) exit 1
            for (i = 0; i < files; i++) {
                head = 4 * i
                tail = 4 * files + 22 * i
                zip = byte[head + 1] == 80 && byte[head + 2] == 75 && byte[head + 3] == 3 && byte[head + 4] == 4
                end = byte[tail + 1] == 80 && byte[tail + 2] == 75 && byte[tail + 3] == 5 && byte[tail + 4] == 6
                if (zip && !end) exit 1
                if (byte[head + 1] + byte[head + 2] + byte[head + 3] + byte[head + 4] == 0) exit 1
            }
        }'
}

# whole_safetensors FILE: 8 bytes with the length of the header, the header in JSON, then the tensors.
whole_safetensors() {
    local size header end
    size=$(stat -L -c %s "$1")
    header=$(od -An -tu8 -N8 "$1" | tr -d ' ')
    [ -n "$header" ] && [ "${#header}" -le 12 ] && ((size >= 8 + header)) || return 1
    end=$(head -c "$((8 + header))" "$1" | tail -c "$header" | grep -a -o -E '"data_offsets": *\[[0-9]+, *[0-9]+\]' |
        sed 's/.*, *\([0-9]*\)]/\1/' | sort -n | tail -n 1)
    ((size == 8 + header + ${end:-0}))
}

# whole_json FILE: succeed if every bracket and every text is closed. What is between quotes does not count.
whole_json() {
    LC_ALL=C sed 's/\\.//g' "$1" | LC_ALL=C awk '
        BEGIN { RS = "\"" }
        NR % 2 { opened += gsub(/[[{]/, ""); closed += gsub(/[]}]/, "") }
        END { exit !(opened > 0 && opened == closed && NR % 2) }'
}

# whole_pickle FILE: a pickle of protocol 4 and later consists of frames that begin with their lengths. It ends with a full stop.
whole_pickle() {
    local size at=2
    size=$(stat -L -c %s "$1")
    [ "$(tail -c 1 "$1" | tr -d '\0')" = . ] || return 1
    while ((at < size)); do
        [ "$(number_at "$1" "$at" 1)" = 149 ] || return 0 # something large outside of a frame, or an older protocol
        at=$((at + 9 + $(number_at "$1" $((at + 1)) 8)))
    done
    ((at == size))
}

# number_at FILE OFFSET BYTES: print the number that is there.
number_at() { tail -c "+$(($2 + 1))" "$1" | head -c "$3" | od -An "-tu$3" | tr -d ' \n'; }
