#!/bin/sh
# The program that pyxis starts for each image. It runs with the variables of the user's job, which are meant for the
# container: with PYTHONHOME, PYTHONPATH or LD_LIBRARY_PATH among them, this installation's Python might not start.
unset LD_LIBRARY_PATH LD_PRELOAD
runner=$(command -p readlink -f -- "$0") && runner=${runner%/*}/runner
# pip writes the path of its Python into the first line of `runner`, or into the second: '''exec' PATH "$0" "$@"
{ IFS= read -r first && IFS= read -r second; } < "$runner" || exit 1
case $first in
  '#!/bin/sh')
    python=${second#*exec\' } python=${python%% \"\$0\"*}
    python=${python#[\"\']} python=${python%[\"\']}
    ;;
  *) python=${first#??} ;;
esac
# -I: no PYTHON* variables, no packages of the user's home, no modules of the current folder
exec "$python" -I "$runner" importer "$@"
