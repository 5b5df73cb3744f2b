# Reads one CDI file, in JSON or in the YAML of nvidia-ctk (block style; flow style for values), and prints what it does to
# a container, one action a line, fields separated by tabs:
#
#   mount HOST_PATH PATH    node HOST_PATH PATH    env NAME=VALUE    link TARGET PATH    compat HOST_DRIVER_VERSION
#   missing NAME NAMES      the file has no device NAME; it has NAMES
#
# wanted: names of devices, separated by commas. `all` without such a device means every device; empty means what is common
# to all devices. Prints nothing for another kind than nvidia.com/gpu. POSIX awk: mawk, gawk and busybox.

function unquoted(text) {
  if (text ~ /^".*"$/) {
    text = substr(text, 2, length(text) - 2)
    gsub(/\\\//, "/", text)
    gsub(/\\"/, "\"", text)
    gsub(/\\\\/, "\\", text)
  } else if (text ~ /^'.*'$/) {
    text = substr(text, 2, length(text) - 2)
    gsub(/''/, "'", text)
  }
  return text
}

function keep(path, text) {
  paths[++size] = path
  values[size] = unquoted(text)
}

# ---- flow style: JSON is a part of it. Reads the variable `rest`. ----------------------------------------------------

function skip() { sub(/^[ \t\r\n]+/, "", rest) }

function token(text) {
  if (!match(rest, /^"([^"\\]|\\.)*"/) && !match(rest, /^'([^']|'')*'/) && !match(rest, /^[^],}[{ \t\r\n]+/)) {
    rest = "" # not CDI: stop here
    return ""
  }
  text = substr(rest, 1, RLENGTH)
  rest = substr(rest, RLENGTH + 1)
  return text
}

function flow(path, key, number) {
  skip()
  if (rest ~ /^[[{]/) {
    number = 0
    key = substr(rest, 1, 1)
    rest = substr(rest, 2)
    if (key == "[") key = ""
    for (skip(); rest != "" && rest !~ /^[]}]/; skip()) {
      if (rest ~ /^,/) {
        rest = substr(rest, 2)
      } else if (key == "") {
        flow(path "[" number++ "]")
      } else {
        key = token()
        skip()
        if (rest ~ /^:/) rest = substr(rest, 2)
        else sub(/:$/, "", key)
        flow(path "." unquoted(key))
        key = "{"
      }
    }
    rest = substr(rest, 2)
  } else {
    keep(path, token())
  }
}

# ---- block style: the column of a key is 2 * COLUMN, that of a dash 2 * COLUMN + 1, since a list may stand in the column
# of its key

function enter(column, name) {
  while (depth && columns[depth] >= column) depth--
  columns[++depth] = column
  where[depth] = where[depth - 1] name
}

function block(line, column, key) {
  match(line, /^ */)
  column = RLENGTH
  line = substr(line, column + 1)
  while (line ~ /^-( |$)/) {
    while (depth && columns[depth] >= 2 * column + 1) depth--
    enter(2 * column + 1, "[" count[where[depth]]++ "]")
    match(line, /^- */)
    column += RLENGTH
    line = substr(line, RLENGTH + 1)
  }
  if (match(line, /^("[^"]*"|'[^']*'|[A-Za-z0-9_.\/-]+):( +|$)/)) {
    key = substr(line, 1, RLENGTH)
    line = substr(line, RLENGTH + 1)
    sub(/: *$/, "", key)
    enter(2 * column, "." unquoted(key))
  }
  if (line ~ /^[[{]/) {
    rest = line
    flow(where[depth])
  } else if (line != "" && line !~ /^#/) {
    if (line !~ /^["']/) sub(/ +#.*$/, "", line)
    sub(/ +$/, "", line)
    keep(where[depth], line)
  }
}

{ sub(/\r$/, "") }
!begun && /^[ \t]*[{]/ { json = 1 }
json { rest = rest $0 "\n"; begun = 1; next }
/^[ \t]*(#|$)/ || /^(---|\.\.\.)/ { next }
{ begun = 1; block($0) }

# ---- the actions -----------------------------------------------------------------------------------------------------

function act(line) { if (!(line in acted)) print line; acted[line] = 1 }

END {
  if (json) flow("")
  for (i = 1; i <= size; i++) {
    if (paths[i] == ".kind") kind = values[i]
    if (paths[i] ~ /^\.devices\[[0-9]+\]\.name$/) {
      device = substr(paths[i], 1, length(paths[i]) - 5)
      named[values[i]] = device
      names = names (names == "" ? "" : ", ") values[i]
      devices[device] = 1
    }
  }
  if (kind != "nvidia.com/gpu") exit
  every = wanted == "all" && !("all" in named)
  parts = split(wanted, list, ",")
  for (i = 1; i <= parts && !every; i++) {
    if (list[i] in named) chosen[named[list[i]]] = 1
    else { print "missing\t" list[i] "\t" names; exit }
  }
  for (i = 1; i <= size; i++) {
    path = paths[i]
    if (path !~ /^(\.devices\[[0-9]+\])?\.containerEdits\./) continue
    at = index(path, ".containerEdits.")
    device = substr(path, 1, at - 1)
    if (at > 1 && !every && !(device in chosen)) continue
    path = substr(path, at + 16)
    item = device " " substr(path, 1, index(path, "]"))
    field = substr(path, index(path, "]") + 1)
    if (path ~ /^env\[/) act("env\t" values[i])
    else if (path ~ /^hooks\[[0-9]+\]\.args\[/) {
      if (values[i] ~ /^--link=/) { before = "--link"; sub(/^--link=/, "", values[i]) }
      if (before == "--link" && (cut = index(values[i], "::")))
        act("link\t" substr(values[i], 1, cut - 1) "\t" substr(values[i], cut + 2))
      if (values[i] ~ /^--host-driver-version=/) act("compat\t" substr(values[i], 23))
      before = values[i]
    } else if (path ~ /^(mounts|deviceNodes)\[/ && field ~ /^\.(hostPath|containerPath|path)$/) {
      if (!(item in order)) { order[item] = ++items; listed[items] = item }
      if (field == ".hostPath") host[item] = values[i]
      else inside[item] = values[i]
    }
  }
  for (i = 1; i <= items; i++) {
    item = listed[i]
    if (item ~ / mounts\[/) act("mount\t" host[item] "\t" inside[item])
    else act("node\t" (item in host ? host[item] : inside[item]) "\t" inside[item])
  }
}
