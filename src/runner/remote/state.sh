# Print the token of a copy. If somebody has changed its files since, the names of the unchanged ones follow.
# Set before: c (copies), mark, key.
# shellcheck shell=sh disable=SC2154,SC2016
echo "$mark"
echo "$mark" >&2
s=.state/$key
cd "$c" 2>/dev/null && cat "$s/token" 2>/dev/null || exit 0
unchanged() {
    xargs -0r sh -c 'find "$@" -maxdepth 0 ! -cnewer "$0" -print0 2>/dev/null' "$s/token" <"$s/files"
}
if [ "$(unchanged | tr -cd '\0' | wc -c)" -ne "$(tr -cd '\0' <"$s/files" | wc -c)" ]; then
    printf '\0'
    unchanged
fi
exit 0
