#!/usr/bin/env bash
@mark@: Megatron-LM on one node; every node runs this file.
#   MEGATRON=checkout DATA=prefix TOKENIZER=folder CHECKPOINTS=folder megatron.sh FIRST_HOST:@port@
set -u
: "${MEGATRON:?the folder that holds pretrain_gpt.py}"
: "${DATA:?the prefix of a data set that tools/preprocess_data.py wrote}"
: "${TOKENIZER:?a folder with a Hugging Face tokenizer}"
: "${CHECKPOINTS:?a folder that all nodes see}"
@exports@
cd -- @workdir@ || exit 2
arguments=(
@arguments@
  --data-path "$DATA"
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model "$TOKENIZER"
  --save "$CHECKPOINTS"
  --load "$CHECKPOINTS"
)
exec @python@ -m torch.distributed.run @meeting@ \
  --nproc-per-node=@ranks@ --max-restarts=@restarts@ \
  "$MEGATRON/pretrain_gpt.py" "${arguments[@]}"
