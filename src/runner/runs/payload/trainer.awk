# Reads what a trainer printed, and prints lines for metrics.jsonl. payload/trainer.sh calls it. POSIX awk; every number of
# bytes is right only with LC_ALL=C.
#   awk -v now=TIME -v before=TIME -v attempt=N -v world=N -v last=0|1 -f trainer.awk TRAINERS -
#   TRAINERS   the patterns (the file `trainers` of the run folder); each pattern matches the text before a number
#   stdin      records that begin with \001: `s KEY VALUE` is the state from the last call, `f N TIME NAME` begins a log, at byte N, which
#              was written at TIME. The text of a log ends with \001e, without a line feed before it if the last line is not complete yet.
#   stdout     lines for metrics.jsonl, which begin with {; then `bytes N NAME`: how much of a log was read; `saved STEP PATH`:
#              the trainer reported a checkpoint; `trainer NAME`: the trainer whose lines were found; `s KEY VALUE`: the state
BEGIN {
    WHOLE_LOSS = "(^|[^A-Za-z_/])[Ll]oss[]\"':=|( ]+"
    OTHER_LOSS = "(^|[^A-Za-z])([Vv]al|VAL|[Vv]alid|[Vv]alidation|[Ee]val|[Ee]valuation|[Tt]est|[Dd]ev)[_ /.-]*[A-Za-z_]*[Ll]oss" \
        "[]\"':=|( ]*([-+]?[0-9.]+([eE][-+]?[0-9]+)?|[a-z]+)"
}
NR == FNR {
    key = $1
    value = substr($0, length(key) + 2)
    if (key == "trainer") {
        trainer[++trainers] = value
        strength[trainers] = (value == "generic" || value == "bars") ? 1 : 2
        if (value == "bars") bars = trainers
    } else if (key == "without_loss") strength[trainers] = 0
    else if (key == "line") {
        line[++lines] = value
        if (!first_line[trainers]) first_line[trainers] = lines
        last_line[trainers] = lines
    } else if (key == "unless") unless[lines] = value
    else if (key == "find") {
        names[lines, ++fields[lines]] = $2
        patterns[lines, fields[lines]] = substr(value, length($2) + 2)
    } else if (key == "detect") detect[trainers] = value
    else if (key == "first_epoch") first_epoch[trainers] = value
    next
}
/^\001s / {
    value = substr($0, length($2) + 5)
    if ($2 == "chosen") choose(value)
    else state[$2] = value
    next
}
/^\001f / {
    bytes = $2
    if ($3 + 0 > written) written = $3 + 0
    file = substr($0, length($2) + length($3) + 6)
    next
}
{
    ended = sub(/\001e$/, "")
    if (ended && !last) text = ""
    else text = $0
    if (!ended || last) bytes += length($0) + !ended
    if (text != "") {
        parts = split(text, part, /\[default[0-9]+\]:/) # torchrun --tee, also in the middle of a line
        tee = parts > 1
        for (i = 1; i <= parts; i++) if (part[i] != "" && length(part[i]) < 20000) read_line(part[i])
    }
    if (ended) print "bytes " bytes " " file
}
END {
    finish()
    for (key in state) if (state[key] != "") print "s " key " " state[key]
}

# choose NAME: read only this trainer's lines.
function choose(word,    t) {
    for (t = 1; t <= trainers; t++) if (trainer[t] == word) state["trainer"] = t
}

# read_line TEXT: find the values of one line.
function read_line(text,    t, i, k, found, value, key, known, seen, training, whole) {
    # tqdm clears its bar before a text and draws it again after the text; `ESC [A` ends the clearing of another bar
    if (text ~ /^ +(\033\[A)?$/) state["cleared"] = (text ~ / $/) ? 1 : ""
    gsub(/\033\[[0-9;?]*[A-Za-z]/, "", text)          # colours
    sub(/^ *[0-9]+: /, "", text)                      # srun --label
    sub(/^\([A-Za-z_.]+ pid=[0-9]+[^)]*\) /, "", text) # Ray
    sub(/^\[(rank *)?[0-9,]+\](<std(out|err)>)?: ?/, "", text) # a rank of torch, mpirun --tag-output
    sub(/^.*\010/, "", text)                          # Keras on a terminal goes back to draw its bar again
    known = state["trainer"]
    if (!any || any_of != known) any = any_line(any_of = known)
    if (text !~ any) return # most lines: one pattern is faster than many, which gawk compiles anew for each line
    # of a bar that was drawn thousands of times since the last call, a part is enough
    if ((!known || known == bars) && text ~ /[0-9]%\||\[=*>/ && ++drawings > 500 && drawings % 20) return
    training = text
    gsub(OTHER_LOSS, " ", training)
    bar_text = text
    for (t = 1; t <= trainers; t++) {
        if (known && t != known && strength[t] <= strength[known]) continue
        if (detect[t] != "" && known != t) {
            if (text !~ detect[t]) continue
            known = state["trainer"] = t
        }
        found = 0
        seen = (strength[t] < 2) ? training : text
        for (key in v) delete v[key]
        for (i = first_line[t]; i && i <= last_line[t]; i++) {
            if (seen !~ line[i] || ((i in unless) && seen ~ unless[i])) continue
            found = 1
            for (k = 1; k <= fields[i]; k++) {
                key = names[i, k]
                if (key == "saved") value = word_after(text, patterns[i, k])
                else value = number_after(seen, patterns[i, k])
                if (key == "loss" && strength[t] < 2 && (whole = number_after(seen, WHOLE_LOSS)) != "") value = whole
                if (key == "rate") key = rate_unit()
                if (value != "" && key != "") v[key] = value
            }
        }
        if (found && take(t)) return
    }
}

# A pattern for all lines of interest, if trainer KNOWN has been found.
function any_line(known,    t, i, found) {
    for (t = 1; t <= trainers; t++) {
        if (known && t != known && strength[t] <= strength[known]) continue
        if (detect[t] != "") found = found "|(" detect[t] ")"
        for (i = first_line[t]; i && i <= last_line[t]; i++) found = found "|(" line[i] ")"
    }
    return (found == "") ? "^$" : substr(found, 2)
}

# The number that follows the first match of PATTERN that a number follows; empty if there is none. Sets `after` to the rest.
function number_after(text, pattern,    rest, number, empty) {
    rest = text
    while (rest != "" && match(rest, pattern)) {
        empty = RLENGTH == 0
        rest = substr(rest, RSTART + RLENGTH)
        if (match(rest, /^[-+]?[0-9][0-9]?[0-9]?(,[0-9][0-9][0-9])+(\.[0-9]+)?/)) {
            number = substr(rest, 1, RLENGTH)
            after = substr(rest, RLENGTH + 1)
            gsub(/,/, "", number)
            return number
        }
        if (match(rest, /^[-+]?([0-9]+(\.[0-9]+)?|\.[0-9]+)([eE][-+]?[0-9]+)?/)) {
            after = substr(rest, RLENGTH + 1)
            return substr(rest, 1, RLENGTH)
        }
        if (match(rest, /^[-+]?([Nn][Aa][Nn]|[Ii][Nn][Ff])/)) return tolower(substr(rest, 1, RLENGTH))
        if (empty) rest = substr(rest, 2)
    }
    return ""
}

# The key of the number that a rate begins with, such as 1.5 of `1.5s/it`; empty if its unit is no step.
function rate_unit() {
    if (after ~ /^( *\([ 0-9.]+\)|s, | +data)/) return "step_seconds" # the time of a step and the mean; `data` is a part of it
    if (after ~ /^ ?s\/(it|iter|step|batch|ba)/) return "step_seconds"
    if (after ~ /^ ?ms\/(it|iter|step|batch|ba)/) return "step_milliseconds"
    return (after ~ /^ ?(it|iters?|steps?|batch|batches|ba)\/s/) ? "steps_per_second" : ""
}

# The word that follows the first match of PATTERN: a path.
function word_after(text, pattern) {
    if (!match(text, pattern)) return ""
    text = substr(text, RSTART + RLENGTH)
    sub(/[ \t].*/, "", text)
    sub(/[.,;:'")]+$/, "", text)
    return text
}

# take T: use the values v of a line of trainer T. Returns 1 if no other trainer needs to see the line.
function take(t,    key, step, drawn) {
    if ("step_milliseconds" in v) {
        v["step_seconds"] = v["step_milliseconds"] / 1000
        delete v["step_milliseconds"]
    }
    if ("steps_per_second" in v) {
        if (v["steps_per_second"] > 0) v["step_seconds"] = 1 / v["steps_per_second"]
        delete v["steps_per_second"]
    }
    if ("saved" in v) {
        print "saved " ("step" in v ? v["step"] : 0 + state["at." t]) " " v["saved"]
        return 0
    }
    if (("tokens" in v) && !("tokens_per_second" in v) && v["step_seconds"] > 0)
        v["tokens_per_second"] = sprintf("%.1f", v["tokens"] / v["step_seconds"])
    if ("heading" in v) {
        v["step"] = state["heading"] = v["heading"]
        delete v["heading"]
    } else if (("loss" in v) && !("step" in v) && t == bars && state["heading"] != "") {
        v["step"] = state["heading"]
        state["heading"] = ""
    }
    if ("epoch_heading" in v) { # a line of its own before the lines of an epoch
        state["epoch." t] = v["epoch_heading"]
        state["epochs." t] = v["epochs"]
        find_first_epoch(v["epoch_heading"] + 0)
    }
    if (t == bars && !("step" in v)) return 0
    if (("epoch_steps" in v) && ("step" in v)) {
        if (t != bars) v["step"] += (v["epoch"] - first_epoch[t]) * v["epoch_steps"]
        else if (!count_epochs(v["step"] + 0, v["epoch_steps"] + 0)) return 0
        if ("epochs" in v) v["total"] = v["epochs"] * v["epoch_steps"]
        delete v["epoch_steps"]
        delete v["epochs"]
    }
    if (v["step"] !~ /^[0-9]+$/ || length(v["step"]) > 15) {
        delete v["step"]
        # A progress bar has the step. Its next line is printed right after these values, unless stdout and stderr take
        # different ways. torchrun looks for new lines of each every 0.1 s: the values may come before or after the bar that
        # was drawn again for them. Without such bars, the last bar has the step, if no step takes less than 0.2 s.
        step = ""
        if (tee && state["drawn." t] != "") {
            if (state["drawn." t] + 0 > state["step"] + 0) step = state["drawn." t]
        } else if (state["step"] != "" && ((tee && state["pace." t] >= 0.2) || other_stream(t))) step = state["at." t]
        if (("loss" in v) && step != "") {
            v["step"] = step
            v["step_seconds"] = state["pace." t]
            return take_step(t)
        }
        for (key in v) {
            if (key == "total" || key == "sequence_length" || key == "batch_size") state[key "." t] = v[key]
            else state["wait." t "." key] = v[key]
        }
        return 0
    }
    if ("total" in v) {
        if (v["total"] !~ /^[0-9]+$/ || v["total"] + 0 < v["step"] + 0) return 0
        # a progress bar of something else, such as an evaluation
        if (!("loss" in v) && state["step"] != "" && state["total." t] != "" && state["total." t] != v["total"]) return 0
        state["total." t] = v["total"]
    }
    drawn = state["cleared"]
    state["cleared"] = ""
    if (drawn) state["drawn." t] = v["step"]
    for (key in state) {
        if (index(key, "wait." t ".") != 1 || state[key] == "" || (tee && state["drawn." t] != "" && !drawn)) continue
        if (!(substr(key, length("wait." t ".") + 1) in v)) v[substr(key, length("wait." t ".") + 1)] = state[key]
        state[key] = ""
    }
    if ("step_seconds" in v) state["pace." t] = v["step_seconds"]
    return take_step(t)
}

# find_first_epoch EPOCH: programs count epochs from 0 or 1.
function find_first_epoch(epoch) {
    if (state["first_epoch"] == "" || epoch == 0) state["first_epoch"] = (epoch > 0) + 0
}

# count_epochs N M: step N of the M steps of an epoch becomes a step of the training. Returns 0 if the line must not count.
function count_epochs(n, m) {
    if (m < 1 || n > m) return 0
    if ("epoch_from_0" in v) {
        v["epoch"] = v["epoch_from_0"]
        state["first_epoch"] = 0
        delete v["epoch_from_0"]
    } else if ("epoch" in v) find_first_epoch(v["epoch"] + 0)
    else return follow_bar(n, m)
    # the steps of some programs go on over the epochs; a resumed one of them is known by its large first step
    if (state["last_epoch"] != "") {
        if (v["epoch"] + 0 > state["last_epoch"] + 0) state["go_on"] = n > state["last_step"] + 0
    } else if (v["epoch"] + 0 > state["first_epoch"] + 0 && n > m / 4 && bar_text ~ /([Ss]tep|[Ii]ter)[^(]/) state["go_on"] = 1
    state["last_epoch"] = v["epoch"]
    state["last_step"] = n
    if (state["go_on"] + 0) {
        v["total"] = m
        delete v["epochs"]
    } else v["step"] = n + (v["epoch"] - state["first_epoch"]) * m
    return 1
}

# follow_bar N M: step N of M of a bar without an epoch becomes a step of the training. A bar that starts again is the next epoch.
# Returns 0 if it is the bar of something else.
function follow_bar(n, m,    seconds, part, parts, i) {
    if (match(bar_text, /\[[0-9:]+</)) {
        parts = split(substr(bar_text, RSTART + 1, RLENGTH - 2), part, /:/)
        for (i = 1; i <= parts; i++) seconds = seconds * 60 + part[i]
    }
    seconds += 0
    if (state["bar_steps"] != m || state["bar_file"] != file) {
        if (n == 0) state["bar_after"] = (state["bar_steps"] != "" && state["bar_step"] + 0 >= 0.9 * state["bar_steps"]) ? m : ""
        # without a description and a loss: if a step takes 0.02 s or more, and the bar 10 s, which is not certain at its start
        if (("undescribed" in v) && !("loss" in v) && (v["step_seconds"] + 0 < 0.02 || m * v["step_seconds"] < 10 || seconds < 5)) return 0
        if (state["bar_steps"] != "" && !replaces_bar(m, seconds)) return 0
        if (state["trainer"] == "" || state["trainer"] == bars) state["step"] = state["shown"] = ""
        state["before"] = state["bar_ended"] = ""
    } else if (state["bar_step"] - n >= m / 2) {
        state["before"] += m
        state["bar_ended"] = state["bar_seconds"]
    } else if (n - state["bar_step"] > m / 2 && state["bar_ended"] + 0 > 0 && seconds >= 0.8 * state["bar_ended"])
        return 0 # a slower rank, which has not begun the epoch
    state["bar_steps"] = m
    state["bar_file"] = file
    state["bar_step"] = n
    state["bar_seconds"] = seconds
    state["bar_pace"] = v["step_seconds"]
    delete v["undescribed"]
    if (state["epoch." bars] != "") {
        v["epoch"] = state["epoch." bars]
        if (state["epochs." bars] != "") v["epochs"] = state["epochs." bars]
        v["step"] = n + (v["epoch"] - state["first_epoch"]) * m
    } else if (state["before"]) v["step"] = n + state["before"]
    else v["total"] = m
    return 1
}

# Succeed if a bar of M steps, drawn SECONDS after its start, is the one of the training, and the bar before was not: only this
# one has a loss, or it takes longer and began after the other: it is not a bar of the epochs around it.
function replaces_bar(m, seconds) {
    if (("loss" in v) && state["trainer"] != bars) return 1
    if (m == state["bar_steps"] || (!("loss" in v) && state["trainer"] == bars)) return 0
    return state["bar_step"] + 0 >= 0.9 * state["bar_steps"] && \
        (seconds < state["bar_seconds"] + 0 || m == state["bar_after"]) && \
        m * v["step_seconds"] > state["bar_steps"] * state["bar_pace"]
}

# Succeed if the last step of trainer T was in job.err and this line is in job.log, or the other way round.
function other_stream(t) {
    return state["at_file." t] != file && file !~ /\/attempts\// && state["at_file." t] !~ /\/attempts\//
}

# take_step T: use the values v of trainer T, which have a step. Returns 1 if no other trainer needs to see the line.
function take_step(t,    step, key) {
    step = v["step"] + 0
    state["at." t] = step
    state["at_file." t] = file
    if (!("loss" in v) && strength[t]) return state["trainer"] == t
    if (state["trainer"] == bars && t != bars) { # what the bar counted may be something else
        state["step"] = ""
        count = 0
    }
    if (count && newest == step && newest_of == t && newest_file == file) {
        # more about the same step; a progress bar first shows the loss of the step before
        for (key in newest_values) if (!(key in v)) v[key] = newest_values[key]
        count--
    } else if (state["step"] != "" && step <= state["step"] && (step * 2 >= state["step"] || state["step_file"] != file))
        return state["trainer"] == t # the same step from the log of another rank
    state["step_file"] = file
    if (state["told"] != t) print "trainer " trainer[t]
    state["trainer"] = state["told"] = t
    state["step"] = step
    add(t, step)
    return 1
}

# add T STEP: an entry with the values v.
function add(t, step,    key, text, batch, total) {
    total = state["total." t]
    text = "{\"step\": " step
    if (total != "" && total + 0 >= step) text = text ", \"total_steps\": " (0 + total)
    batch = ("batch_size" in v) ? v["batch_size"] : state["batch_size." t]
    if (!("tokens_per_second" in v) && batch > 0 && state["sequence_length." t] > 0 && v["step_seconds"] > 0)
        v["tokens_per_second"] = sprintf("%.1f", batch * state["sequence_length." t] / v["step_seconds"])
    if (!("tokens_per_second" in v) && v["tokens_per_second_per_process"] > 0 && world > 0)
        v["tokens_per_second"] = v["tokens_per_second_per_process"] * world
    text = text ", \"loss\": " (("loss" in v) ? json(v["loss"]) : "null")
    for (key in v) if (key !~ /^(step|total|loss)$/ && v[key] != "") text = text ", \"" key "\": " json(v[key])
    entries[++count] = text ", \"attempt\": " (0 + attempt)
    newest = step
    newest_of = t
    newest_file = file
    for (key in newest_values) delete newest_values[key]
    for (key in v) newest_values[key] = v[key]
}

# A number as Python's json reads it.
function json(number) {
    if (number ~ /[nN][aA][nN]/) return "NaN"
    if (number ~ /[iI][nN][fF]/) return (number ~ /^-/ ? "-" : "") "Infinity"
    if (number ~ /^[-+]?[0-9]+$/) return sprintf("%.0f", number)
    return sprintf("%.8g", number)
}

# Print the entries. Their times are spread from the last call until the logs were written, because only that is known. If the
# clock of the file server differs, they are spread until now.
function finish(    t, i, key) {
    t = state["trainer"]
    if (!t && bars && state["at." bars] != "" && state["at." bars] + 0 > state["shown"] + 0) {
        for (key in v) delete v[key]
        if (state["told"] != bars) print "trainer " trainer[bars]
        state["told"] = bars
        v["step_seconds"] = state["pace." bars]
        add(bars, 0 + state["at." bars]) # a bar without a loss, until a trainer is found
    } else if (t) {
        for (key in v) delete v[key]
        if (last && state["wait." t ".loss"] != "" && state["at." t] + 0 > state["step"] + 0) {
            v["loss"] = state["wait." t ".loss"]
            state["step"] = state["at." t]
            add(t, 0 + state["at." t])
        } else if (state["step"] != "" && state["at." t] + 0 > state["step"] + 0 && state["at." t] + 0 > state["shown"] + 0)
            add(t, 0 + state["at." t]) # a step without a loss: a sign of progress
    }
    if (count) state["shown"] = newest
    if (written > before && written < now) now = written
    for (i = 1; i <= count; i++) printf "%s, \"time\": %.2f}\n", entries[i], before + (now - before) * i / count
}
