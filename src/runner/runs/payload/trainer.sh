# shellcheck shell=bash
# Functions of the batch script, on the host. They look into the log of a program that knows nothing of runner, when a decision
# needs it: which trainer it is, which checkpoints it has printed, and whether it has reached its last step. The patterns are in
# the file `trainers` of the run folder. All of these functions must run in the run folder.

# program_logs FOLDER: print BYTES LOG for each log in which the attempt of this folder prints its steps: it begins after so many
# bytes. Besides the main log, that is the one of the last rank.
program_logs() {
    local begins=("${log_bytes:-0}") pattern
    if [ -s "$1/log_bytes" ]; then # the user's own batch script
        mapfile -t begins <"$1/log_bytes"
        printf '%s %s\n' "${begins[0]}" "$1/job.log"
        [ -z "${begins[1]:-}" ] || printf '%s %s\n' "${begins[1]}" "$1/job.err"
    else
        printf '%s job.log\n' "${begins[0]}"
    fi
    for pattern in rank-*.log 'node-*/*/attempt_*/*/stdout.log'; do
        compgen -G "$1/$pattern" | sort -V | tail -n 1 | grep -v '/node-0/.*/0/stdout\.log$' | sed 's/^/0 /' # that is in job.log
    done
}

# log_ends LAST [FIRST]: print the last bytes of each log of this attempt, and before them the first ones.
log_ends() {
    local begin log size from
    program_logs "$RUNNER_ATTEMPT" | while read -r begin log; do
        size=$(stat -L -c %s "$log" 2>/dev/null || echo 0)
        from=$((size - $1 > begin ? size - $1 : begin))
        [ -z "${2:-}" ] || tail -c "+$((begin + 1))" "$log" | head -c "$2"
        echo
        tail -c "+$((from + 1))" "$log"
        echo
    done 2>/dev/null
}

# Copy the text without colours, and without what srun, Ray, mpirun and torchrun put before a line. Each drawing of a progress
# bar becomes a line.
bare_lines() {
    # shellcheck disable=SC2020 # a set of characters
    tr '\r\000' '\n\n' | LC_ALL=C sed -E -e $'s/\033\\[[0-9;?]*[A-Za-z]//g' -e 's/^.*\[default[0-9]+\]://' \
        -e 's/^ *[0-9]+: //' -e 's/^\([A-Za-z0-9_.-]+,?( rank=[0-9]+,)? pid=[0-9]+[^)]*\) //' \
        -e 's/^\[(rank *)?[0-9,]+\](<std(out|err)>)?: ?//'
}

# Write the name of the trainer whose lines the log has to attempts/N/trainer, for save_signals (signals.sh). Only trainers with
# a save signal are looked for, and only if the job names no signal. A program that writes metrics.jsonl knows of runner, and
# saves without a signal of a trainer.
recognize_trainer() {
    local patterns line key name=
    [ ! -e "$RUNNER_ATTEMPT/trainer" ] && [ ! -s metrics.jsonl ] && [ -z "$(task_variable RUNNER_SAVE_SIGNAL)" ] || return 0
    patterns=$(sed -n 's/^recognize //p' trainers 2>/dev/null)
    [ -n "$patterns" ] || return 0
    line=$(log_ends 2000000 2000000 | bare_lines | LC_ALL=C grep -a -m 1 -E -e "$patterns") || return 0
    while IFS= read -r key; do
        case $key in
        'trainer '*) name=${key#trainer } ;;
        'recognize '*) ! LC_ALL=C grep -a -q -E -e "${key#recognize }" <<<"$line" || break ;;
        esac
    done <trainers
    write_line "$RUNNER_ATTEMPT/trainer" "$name"
}

# note_saved FOLDER: write STEP PATH to attempts/N/saved for each checkpoint whose path the trainer has printed. If that line does
# not name the step, it is the last one before it. First, grep takes the few lines that matter, because a log may be large.
note_saved() {
    local begin log patterns
    grep -q '^find saved ' trainers 2>/dev/null || return 0
    patterns=$(sed -n -e 's/^line ^/line /' -e 's/^line //p' trainers)
    program_logs "$1" | while read -r begin log; do
        timeout 60 tail -c "+$((begin + 1))" "$log" 2>/dev/null | LC_ALL=C grep -a -E -e "$patterns" | bare_lines |
            LC_ALL=C awk '
                NR == FNR {
                    if ($1 == "trainer") trainer++
                    else if ($1 == "line") { line[++lines] = substr($0, 6); of[lines] = trainer }
                    else if ($1 == "unless") unless[lines] = substr($0, 8)
                    else if ($1 " " $2 == "find step") step[lines] = substr($0, 11)
                    else if ($1 " " $2 == "find saved") saved[lines] = substr($0, 12)
                    next
                }
                {
                    for (i = 1; i <= lines; i++) {
                        if ($0 !~ line[i] || ((i in unless) && $0 ~ unless[i])) continue
                        if ((i in step) && match($0, step[i])) {
                            text = substr($0, RSTART + RLENGTH)
                            if (match(text, /^[0-9]+/)) at[of[i]] = substr(text, 1, RLENGTH)
                        }
                        if ((i in saved) && match($0, saved[i])) {
                            text = substr($0, RSTART + RLENGTH)
                            sub(/[ \t].*/, "", text)
                            sub(/[.,;:\047")]+$/, "", text)
                            entry = 0 + at[of[i]] " " text
                            if (text != "" && !(entry in printed)) print entry
                            printed[entry] = 1
                        }
                    }
                }' trainers -
    done >"$1/.saved.partial"
    if [ -s "$1/.saved.partial" ]; then mv "$1/.saved.partial" "$1/saved"; else rm -f "$1/.saved.partial"; fi
} 2>/dev/null

# Print STEP TOTAL BEFORE: the last count `N/M` at the end of the log, and the one before. Where there are several, such as those
# of an evaluation, it is that with the largest M; first of those that moved, and ended more than a move before M. The steps of an
# epoch count only in the last epoch; if the number of epochs is not known, print nothing.
last_count() {
    log_ends 16000 | bare_lines | LC_ALL=C awk '
        /[Ss]hard|[Ww]eights|[Cc]heckpoint|[Ee]val|[Vv]alid|[Tt]est|[Pp]redict/ { next }
        /[Ll]oading|[Ww]riting|[Dd]ownload|[Uu]pload|[Ff]etching|Map/ { next }
        {
            text = $0
            epoch = unknown = 0
            while (match(text, /[0-9]+ *\/ *[0-9]+/)) {
                before = substr(text, 1, RSTART - 1)
                count = substr(text, RSTART, RLENGTH)
                text = substr(text, RSTART + RLENGTH)
                if (before ~ /[A-Za-z.\/-]$/ || text ~ /^[A-Za-z.\/-]/) continue # a path, a date, a unit
                if (text ~ /^ [0-9][0-9]:[0-9][0-9]:[0-9]/) continue # a date without a year
                split(count, part, "/")
                if (before ~ /[Ee]poch[^0-9]*$/) {
                    epoch = 1
                    epoch_step = part[1] + 0
                    epochs = part[2] + 0
                } else {
                    if (before ~ /[Ee]poch/) unknown = 1
                    total = part[2] + 0
                    if ((total in step) && step[total] != part[1] + 0) earlier[total] = step[total]
                    step[total] = part[1] + 0
                }
            }
            if (unknown && !epoch) endless = 1
        }
        END {
            for (total in step) {
                ended_early = (total in earlier) && total - step[total] > step[total] - earlier[total]
                if (ended_early > chosen_early || (ended_early == chosen_early && total + 0 > chosen)) {
                    chosen = total + 0
                    chosen_early = ended_early
                }
            }
            if (epoch_step < epochs) print epoch_step, epochs, epoch_step - 1
            else if (chosen && !endless) print step[chosen], chosen, earlier[chosen] + 0
        }'
}
