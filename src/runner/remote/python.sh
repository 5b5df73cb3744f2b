# Print the newest suitable Python: its path, version, machine and glibc, one a line. Set before: mark.
# shellcheck shell=sh disable=SC2154
echo "$mark"
echo "$mark" >&2
uv=$(uv python find '>=3.11' 2>/dev/null)
for python in python3.14 python3.13 python3.12 python3.11 python3 "$uv"; do
    "$python" - 2>/dev/null <<'END' && exit
import os, platform, sys
if sys.version_info < (3, 11) or sys.implementation.name != "cpython":
    sys.exit(1)
print(os.path.realpath(sys.executable), "%d.%d" % sys.version_info[:2], platform.machine(), platform.libc_ver()[1], sep="\n")
END
done
exit 0
