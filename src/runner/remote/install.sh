# Install the zip archive on stdin as a virtual environment of its own. Set before: d (folder), mark, version, python, tag, sum.
# Nothing has its final name before it is complete, so a lost connection or a second installation does no harm.
# shellcheck shell=sh disable=SC2154
echo "$mark"
echo "$mark" >&2
fail() {
    echo "$1" >&2
    exit 1
}
target=$d/versions/$version
new=$target.$$.partial
mkdir -p "$d/versions" || exit
find "$d/versions" -maxdepth 1 -name '*.partial' -mmin +60 -exec rm -rf {} +
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM PIPE # PIPE: a message to a lost connection must not skip the clean-up
packages=$new/lib/python$tag/site-packages
mkdir -p "$new/bin" "$packages" && cat >"$new/archive" || exit
[ "$(sha256sum <"$new/archive")" = "$sum  -" ] || fail 'not all files have arrived'
ln -s "$python" "$new/bin/python"
echo "home = ${python%/*}" >"$new/pyvenv.cfg"
"$new/bin/python" -m zipfile -e "$new/archive" "$packages" && rm "$new/archive" || exit
cat >"$new/bin/runner" <<'END'
#!/bin/sh
exec "${0%/*}/python" -P -m runner "$@"
END
chmod +x "$new/bin/runner"
said=$("$new/bin/runner" --version) || exit
[ "$said" = "runner $version" ] || fail "the installation answers: $said"
echo "$sum" >"$new/sum"
[ "$(cat "$target/sum" 2>/dev/null)" != "$sum" ] || exit 0 # another installation was faster
[ ! -e "$target" ] || mv -T "$target" "$target.$$.old.partial" # commands that still use it keep their files for an hour
mv -T "$new" "$target"
