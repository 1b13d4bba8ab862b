#!/bin/sh
# Profiles rungs of the ladder with Nsight Compute: ./profile.sh v4, ./profile.sh all, --help.
# PYTHON names the interpreter that has fastattn installed. As root, which may read the counters:
#   sudo -E PYTHON="$(command -v python3)" ./profile.sh all
exec "${PYTHON:-python3}" -m fastattn.profile "$@"
