#!/usr/bin/env bash
# Writes a folder for the Hugging Face Hub, with a model card, for each of the weights in the package.
# Usage: launch/hub.sh [FOLDER]    Default: hub
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
for file in "$project"/tabicl_train/weights/*.safetensors; do
    name=$(basename "$file" .safetensors)
    tabicl-export checkpoint="$name" output="${1:-hub}/$name"
done
