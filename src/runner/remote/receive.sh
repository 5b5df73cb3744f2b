# Bring a copy up to date with the archive on stdin, which begins with the lists files, put and gone of .state/KEY.
# Set before: c (copies), mark, key, old and new (tokens), sum. "$@": files that become site files of this user.
# Nothing is changed before all has arrived, and the copy has no token while it is changed.
# shellcheck shell=sh disable=SC2154,SC2016
echo "$mark"
echo "$mark" >&2
s=.state/$key
fail() {
    echo "$1" >&2
    exit 1
}
mkdir -p "$c/$s" && cd "$c" || exit
find "$s" -name '*.part' -mmin +60 -delete # of a process that was killed
trap 'rm -f "$s/$$.part"' EXIT
trap 'exit 1' HUP INT TERM PIPE # PIPE: a message to a lost connection must not skip the clean-up
cat >"$s/$$.part" || exit
[ "$(sha256sum <"$s/$$.part")" = "$sum  -" ] || fail 'not all files have arrived'
exec 9>"$s/lock"
flock -E 5 -w 60 9 || [ $? -ne 5 ] || fail "another process holds the lock $c/$s/lock" # some file systems have no locks
there=$(cat "$s/token" 2>/dev/null)
[ "$there" != "$new" ] || [ "$old" = "$new" ] || exit 0 # another command has sent the same files
[ "$there" = "$old" ] || fail 'another command has sent other files at the same time'
extract() { tar -xzf "$s/$$.part" --no-same-owner --no-same-permissions -m "$@"; }
extract "$s" || exit
# what somebody has changed since is kept under another name
cat "$s/put" "$s/gone" | xargs -0r sh -c 'find "$@" -maxdepth 0 -cnewer "$0" \
    -exec mv --backup=numbered -- {} {}.orig \; -print0 2>/dev/null' "$s/token"
rm -f "$s/token"
xargs -0r rm -f -- <"$s/gone" || exit
xargs -0r dirname -z -- <"$s/gone" | sort -zu | xargs -0r rmdir -p --ignore-fail-on-non-empty -- 2>/dev/null
extract || exit
sites=${XDG_CONFIG_HOME:-$HOME/.config}/runner/sites
for file in "$@"; do
    link=$sites/${file##*/}
    cmp -s "$file" "$link" && continue
    [ -L "$link" ] || [ ! -e "$link" ] || fail "$link is another file than on this machine: remove it, or make it the same"
    mkdir -p "$sites" && ln -sfn "$c/$file" "$link" || exit
done
echo "$new" >"$s/token.part" && mv "$s/token.part" "$s/token"
