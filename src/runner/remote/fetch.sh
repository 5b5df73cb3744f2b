# Print a file of the folder of copies as base64, and remove it, with the folder that was made for it.
# Set before: c (copies), mark, name.
# shellcheck shell=sh disable=SC2154
echo "$mark"
echo "$mark" >&2
base64 -- "$c/$name" && rm -f -- "$c/$name" || exit
case $name in */*) rmdir -- "$c/${name%/*}" 2>/dev/null ;; esac
exit 0
