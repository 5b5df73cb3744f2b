# Start a verb; the words are "$@". Set before: d (folder), c (copies), mark, version, site, top, here, writes.
# shellcheck shell=sh disable=SC2154
r=$d/versions/$version/bin/runner v="runner $version"
if [ ! -x "$r" ]; then
    r=$(command -v runner) || r=$HOME/.local/bin/runner
    [ -x "$r" ] && v=$("$r" --version 2>/dev/null </dev/null) || v=
fi
[ "$v" = "runner $version" ] || { echo "$mark ${v:-missing} 0"; exit; }
[ -z "$site" ] || export RUNNER_SITE="$site"
# the copy of the project around the user, if there is one; or else the home folder
if [ -d "$c$top/.runner-sent" ]; then
    mkdir -p "$c$here" && cd "$c$here" || exit
else
    cd || exit
fi
[ -z "$writes" ] || mkdir -p "$c" || exit
[ -t 1 ] || echo "$mark" >&2
echo "$mark ready $$"
exec "$r" "$@"
