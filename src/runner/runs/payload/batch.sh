# shellcheck shell=bash
# bash reads this file before the user's own batch script, because submit.sh sets BASH_ENV. It makes attempts/N, then runs
# the very same command line again as a child, with the environment that Slurm gave to the job, and records how it ended.
# It never returns. Functions of the other files of payload/ do most of this.
# shellcheck disable=SC2317 # traps and the other files call the functions below
# First, this bash is replaced by one with an empty environment, because functions and options in the job's environment, such as
# a function `cd` or failglob, are for the script alone. The job's words and variables, as Slurm set them, arrive on the
# descriptors 8 and 9. Until then: keywords only, because a command may be such a function, and no output, because of -x.
{
    # only Slurm's copy of the batch script: a login shell reads this file for the programs of its profile too
    if [[ ${0##*/} = slurm_script ]]; then
        {
            POSIXLY_CORRECT=1 # in this mode, no function replaces exec
            exec -c "$BASH" "$BASH_ENV" 2>&4
        } 8< <(/usr/bin/env cat "/proc/$BASHPID/cmdline" && [[ -n $0 ]]) 9< <(/usr/bin/env cat "/proc/$BASHPID/environ" && [[ -n $0 ]])
    fi
} 4>&2 2>/dev/null
[[ $0 = "${BASH_SOURCE[0]}" ]] || return 0
bash_file=$0
RUNNER_RUN=${bash_file%/payload/batch.sh}
exec 3>&1 # 3 and 4: the user's output files
folder=$PWD array_job='' array_task=''
# shellcheck disable=SC2034 # checkpoints.sh: relative paths in the output begin there
program_folder=$folder

# Sets gpus, hang_seconds, export_env, bash_env, bash_env_of_login, withheld, is_array, restart_words.
withheld=()
# shellcheck source=/dev/null
. "$RUNNER_RUN/settings.sh"

# use NAME=VALUE: let the other files of payload/ use a variable of the job: one in capital letters, one that may be a secret,
# which messages must not show, or a proxy. Not one with a meaning for bash, nor a long one, which makes each command slower.
use() {
    local name=${1%%=*}
    case $name in
    *[!A-Za-z0-9_]* | [0-9]* | BASH* | POSIXLY_CORRECT | SHELLOPTS | CDPATH | GLOBIGNORE | EXECIGNORE | FUNCNEST | ENV | IFS | PS4 | TMOUT) return ;;
    UID | EUID | PPID | PWD | OLDPWD | SHLVL | _) return ;;
    PATH | LD_LIBRARY_PATH | SLURM* | RUNNER_* | *_proxy) ;;
    *)
        [[ $name != *[a-z]* ]] || may_be_secret "$name" || return
        ((${#1} < 10000)) || return
        ;;
    esac
    export "$name=${1#*=}"
}

may_be_secret() { [[ ${1^^} =~ TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|WEBHOOK|_PWD$|(^|_)(PAT|DSN)$ || ${2:-} =~ ://[^/@]*:[^/@]*@ ]]; }

words=() variables=()
while IFS= read -r -d '' word; do words+=("$word"); done <&8
while IFS= read -r -d '' word; do
    case $word in
    =* | BASH_ENV=* | RUNNER_RUN=* | RUNNER_ATTEMPT=* | RUNNER_SAVE_AND_EXIT=*) continue ;;
    RUNNER_AGAIN=*) ;;
    SLURM_EXPORT_ENV=*) variables+=("SLURM_EXPORT_ENV=${export_env:-${word#*=}}") ;;
    *=*) variables+=("$word") ;;
    *) continue ;;
    esac
    use "$word" 2>/dev/null
done <&9
for descriptor in "/proc/$$/fd"/*; do # bash has a second descriptor for each
    for pipe in 8 9; do
        [ ! "$descriptor" -ef "/proc/$$/fd/$pipe" ] || [ "${descriptor##*/}" = "$pipe" ] || other=${descriptor##*/}
        [ -z "${other:-}" ] || { exec {other}>&- && other=; }
    done
done
exec 8<&- 9<&-

if [ -n "${is_array:-}" ] && [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    array_job=${SLURM_ARRAY_JOB_ID:-} array_task=$SLURM_ARRAY_TASK_ID
    [ ! -e "$RUNNER_RUN/$array_task/run.json" ] || RUNNER_RUN=$(cd -P "$RUNNER_RUN/$array_task" && pwd) # each task is a run
fi
# Without --export=ALL, Slurm takes the variables from a login shell, but ours has replaced its BASH_ENV.
# shellcheck disable=SC2016 # the login shell expands it
[ -z "${bash_env_of_login:-}" ] ||
    bash_env=$(timeout 20 env -i HOME="$HOME" "${SHELL:-bash}" -lc 'printf %s "${BASH_ENV:-}"' 2>&- <&-)
[ -z "${bash_env:-}" ] || withheld+=("BASH_ENV=$bash_env")
job_words=("${words[@]}")

# An interpreter that does not read BASH_ENV: Slurm's copy is only a wrapper, and RUN/script/NAME (kept) is the script.
if [ -n "${interpreter:-}" ]; then
    set -- "${words[@]}"
    while [ "${1##*/}" != slurm_script ]; do shift; done
    words=("$interpreter" ${interpreter_option:+"$interpreter_option"} "$RUNNER_RUN/$kept" "${@:2}")
fi

# become WORD…: replace this process by `env WORD…`, with the job's variables only. Every user of the node can read command
# lines: a variable that may be a secret stays exported instead.
become() {
    local word name own=() removed=()
    local -A others=([_]=1)
    for name in $(compgen -e); do others[$name]=1; done
    for word in "${variables[@]}"; do
        name=${word%%=*}
        if [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] && may_be_secret "$name" "${word#*=}"; then
            export "$name=${word#*=}"
            unset "others[$name]"
        else
            own+=("$word")
        fi
    done
    for name in "${!others[@]}"; do removed+=(-u "$name"); done
    exec env "${removed[@]}" -- "${own[@]}" "$@"
}

# submit_script FLAG…: submit the script again, with the job's own variables, but without those that name this job, and without
# secrets that the next job reads from their file. submit.sh adds the withheld ones.
submit_script() {
    local word name kept=()
    for word in "${variables[@]}"; do
        name=${word%%=*}
        case $name in
        SLURM_CONF | RUNNER_CACHE | RUNNER_SECRETS) ;;
        SLURM_* | RUNNER_*) continue ;;
        esac
        # shellcheck disable=SC2154 # secrets.sh
        [[ " ${read_names[*]} " = *" $name "* ]] || kept+=("$word")
    done
    variables=("${kept[@]}")
    cd "$folder" && become bash "$RUNNER_RUN/submit.sh" "$@"
}

# If the run folder cannot be written, the script runs all the same, but nothing is recorded.
if ! cd "$RUNNER_RUN" || ! { mkdir -p attempts && : >"attempts/.starts-$SLURM_JOB_ID"; } 2>/dev/null; then
    echo "runner: cannot write to $RUNNER_RUN: the script runs, but runner does not record it" >&2
    cd "$folder" && become "${withheld[@]}" "${words[@]}" 3>&- 4>&-
fi
export RUNNER_RUN

# Our own messages go to attempts/N/runner.log. Before that folder exists, they go to a file that is moved there.
starts=attempts/.starts-$SLURM_JOB_ID
exec 2>"$starts"
trap 'cat "$starts" >&4; rm -f "$starts"' EXIT # if another attempt runs already, for example
# shellcheck source=/dev/null
. payload/attempt.sh
# shellcheck disable=SC2034 # attempt.sh
speaker=runner
all_tasks_finished() { :; } # the exit code of the script tells
output=$(readlink "/proc/$$/fd/3") errors=$(readlink "/proc/$$/fd/4")
log_file=$errors # Slurm writes its messages to the errors
log_of_attempt() { tail -c "+$((log_bytes + 1))" "$errors" 2>/dev/null | tail -c 100000 | tr -d '\0'; }
# shellcheck disable=SC2034 # in_place.sh
program='the script' stays_by_default=

# shellcheck disable=SC2034 # in_place.sh
# find_nodes: end what the script has left running. The next attempt has the same nodes.
find_nodes() {
    kill -KILL -- "-$child" 2>/dev/null
    end_ranks
    next_nodes=$(hostnames "$SLURM_JOB_NODELIST" | paste -s -d ,)
}

# Succeed unless a signal has arrived that the script could not get any more: it does not come again.
# shellcheck disable=SC2034 # in_place.sh
may_go_on() {
    [[ " ${arrived[*]} " != *" TERM "* ]] || ending=yes
    missed+=("${arrived[@]}")
    [ "${#missed[@]}" = 0 ] || { obstacle="the script has missed the signal ${missed[*]}" && return 1; }
}

# Run Slurm's copy of the script again, in the same process. Returns only if that fails.
again() {
    local overlap
    cd "$folder" || return
    overlap=$(steps)
    shopt -s execfail
    trap - EXIT TERM
    exec {start}>&-
    # Only where an old step is left, on a node that does not answer: parallel steps of the script would share their GPUs.
    become BASH_ENV="$bash_file" RUNNER_AGAIN=yes ${overlap:+SLURM_OVERLAP=1} "${job_words[@]}" 1>&3 2>&4 3>&- 4>&- 9>&-
}

[ -z "$array_task" ] || RUNNER_JOB=${array_job}_$array_task
# shellcheck disable=SC2086 # words
[ -z "${restart_words:-}" ] || restarts $restart_words
again=${RUNNER_AGAIN:+again} # in the allocation of the attempt before
unset RUNNER_AGAIN
if grep -q -x -e "${array_job:-$RUNNER_JOB}" -e "$RUNNER_JOB" job_ids 2>/dev/null && [ -d attempts/1 ] &&
    ! grep -q -x "job $SLURM_JOB_ID" attempts/*/started 2>/dev/null; then
    again=again # runner itself submitted this job, as a restart or as part of a chain
fi
next_attempt "${gpus:-0}" "$again"
mv "$starts" "$RUNNER_ATTEMPT/runner.log"

# job.log and job.err are links to the files to which Slurm writes the output.
rm -f job.log job.err
for path in . "$RUNNER_ATTEMPT"; do
    ln -sfn "$output" "$path/job.log"
    [ "$errors" = "$output" ] || ln -sfn "$errors" "$path/job.err"
done
output_bytes=$(stat -L -c %s "$output" 2>/dev/null || echo 0)
log_bytes=$(stat -L -c %s "$log_file" 2>/dev/null || echo 0)
printf '%s\n' "$output_bytes" >"$RUNNER_ATTEMPT/log_bytes"
[ "$errors" = "$output" ] || printf '%s\n' "$log_bytes" >>"$RUNNER_ATTEMPT/log_bytes"

# Two processes that do nothing, and that every signal ends. They tell whom Slurm has signalled:
#   the first is in the group of this process: it dies with `scancel --full`
#   the second is in a group of its own: it dies only if all processes of the job get the signal
start_canaries() {
    canaries=()
    sleep 1000000 >/dev/null 2>&1 3>&- 4>&- 9>&- &
    canaries+=($!)
    set -m
    sleep 1000000 >/dev/null 2>&1 3>&- 4>&- 9>&- &
    canaries+=($!)
    set +m
    disown "${canaries[@]}" # bash prints nothing about their end
}

# has_signal PID: succeed if a signal has ended the process, or is about to. A busy node may take a while to end it.
has_signal() {
    local key value answer=no
    [ -r "/proc/$1/status" ] || return 0
    while read -r key value; do # to the end of the file (payload/signals.sh)
        case $key:$value in State::Z* | SigPnd::*[!0]* | ShdPnd::*[!0]*) answer=yes ;; esac
    done 2>/dev/null <"/proc/$1/status"
    [ "$answer" = yes ]
}

arrived=() # signals that must be passed on, one after the other
missed=()  # those that came when the script had ended

# pass_on SIGNAL: give a signal to the script, unless Slurm has already done so.
pass_on() {
    local waited group='' pauses=3
    [ "$1" != TERM ] || pauses=10 # Slurm sends only TERM to all processes, one by one
    for ((waited = 0; waited < pauses; waited++)); do
        ! has_signal "${canaries[1]}" || break
        pause 0.1
    done
    if has_signal "${canaries[1]}"; then
        [ "$1" != TERM ] || ending=yes
    else
        ! has_signal "${canaries[0]}" || group=-
        say "passing the signal $1 on to the script${group:+ and its processes}"
        kill -s "$1" -- "$group$child" 2>/dev/null || missed+=("$1")
    fi
    kill -KILL "${canaries[@]}" 2>/dev/null
    start_canaries
}

# end_step PID REASON: end the script and all processes of its group (payload/watch.sh, after a hang).
end_step() {
    local waited
    say "$2: ending the script"
    kill -TERM -- "-$1"
    for ((waited = 0; waited < 10; waited++)); do
        pause 1
        kill -0 "$1" 2>/dev/null || return
    done
    kill -KILL -- "-$1"
}

start_canaries
# In a group of its own, as under Slurm, where `kill -- -$$` ends the script with its processes. It starts once we wait for it.
exec {start}<> <(:)
set -m
(
    read -r -u "$start" _
    cd "$folder" || exit
    exec 1>&3 2>&4 3>&- 4>&- 9>&- {start}>&-
    become RUNNER_RUN="$RUNNER_RUN" RUNNER_ATTEMPT="$RUNNER_ATTEMPT" RUNNER_SAVE_AND_EXIT="$RUNNER_SAVE_AND_EXIT" \
        "${withheld[@]}" "${words[@]}"
) &
child=$!
set +m
for signal in HUP INT QUIT ABRT ALRM USR1 USR2 XCPU TERM; do
    # shellcheck disable=SC2064 # now
    trap "arrived+=($signal)" "$signal"
done
log_times 3>&- 4>&- &
watchers=($!)
watch_over "$child" "${hang_seconds:-0}" 3>&- 4>&- &
watchers+=($!)
disown "${watchers[@]}"
note_time step
echo >&"$start"
# Not with `wait`: bash 5.2 forgets the exit code of a process that ends just before a signal with a trap arrives. And a `read`
# in a trap would never return to this one.
while kill -0 "$child" 2>/dev/null; do
    pause 0.2
    while [ "${#arrived[@]}" -gt 0 ]; do
        signal=${arrived[0]} arrived=("${arrived[@]:1}")
        pass_on "$signal"
    done
    [ -z "$ending" ] || finish_attempt 0 # Slurm ends the job, and kills it soon: decide now whether another attempt follows
done
# The exit code 143 does not tell whether TERM has ended the script, but `jobs` does: it still lists a process that has exited
# (Exit 143), and none that a signal has ended. No subshell here: bash would warn about the traps. And no trap for CHLD:
# processes that end while bash reads a command damage its memory then.
{ LC_ALL=C jobs -l && echo written; } >"$RUNNER_ATTEMPT/jobs"
wait "$child"
code=$?
note_end "$code"
kill -KILL "${watchers[@]}" "${canaries[@]}" 2>/dev/null
jobs=$(cat "$RUNNER_ATTEMPT/jobs" 2>/dev/null)
rm -f "$RUNNER_ATTEMPT/jobs"
[ "$code" = 0 ] || [[ " ${arrived[*]} " != *" TERM "* ]] || ending=yes # Slurm ends the job, but the script ended before
finish_attempt "$code"
# If the disk is full, the list is not complete, and the code has to do.
if ((code <= 128)) || [[ $jobs != *written || $jobs =~ \ $child\ (Exit|Done) ]]; then exit "$code"; fi
# A signal ended the script. End in the same way, so that Slurm records the same.
trap - EXIT
ended "$code"
ulimit -c 0
signal=$((code - 128))
trap - "$signal" 2>/dev/null
kill -s "$signal" $$
exit "$code"
