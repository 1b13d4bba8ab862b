#!/bin/sh
# Profiles rungs of the ladder with Nsight Compute: ./profile.sh v4, ./profile.sh all, --help.
# PYTHON names the interpreter that has fastattn installed. As root, which may read the counters:
#   sudo -E PYTHON="$(command -v python3)" ./profile.sh all
python="${PYTHON:-python3}"
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("fastattn") is None)'; then
  echo "profile.sh: $python has no fastattn: install it there, or set PYTHON to one that has it" >&2
  exit 2
fi
exec "$python" -m fastattn.profile "$@"
