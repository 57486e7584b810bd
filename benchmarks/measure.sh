#!/bin/bash
# How benchmarks/results were made: one part after the other on one GPU, from the root of the repository. Of the parts that
# compare speeds nothing else may run at the same time. Rows land in OUT, cells in runs/studies; what is to stay goes
# into results/.
#
#   benchmarks/measure.sh tokens FOLDER     FOLDER: gutenberg_{train,valid,test}.bin.xz, uint16 tokens of GPT-2
#   benchmarks/measure.sh medium            five minutes of training: what decode and prefill read
#   benchmarks/measure.sh decode
set -e
trap : TERM INT  # the command at work hears it as well, and saves; then this ends
OUT=${OUT:-runs/measured}
mkdir -p "$OUT" data runs
part=$1
shift || { sed -n '2,9s/^# \?//p' "$0"; exit 2; }
cable() { python -m cable_attn "$@"; }
decode() { cable bench decode "$@" --results "$OUT/decode.jsonl"; }
prefill() { cable bench prefill "$@" --results "$OUT/prefill.jsonl"; }
study() { cable study run "benchmarks/$1.toml" --out "runs/studies/$1" "${@:2}"; }

case $part in
tokens)  # the books, and one row of those held out to read and go on with; TOKENIZER: for texts with a passkey
  cable data import train="$1/gutenberg_train.bin.xz" validation="$1/gutenberg_valid.bin.xz" \
    test="$1/gutenberg_test.bin.xz" --out data/books ${TOKENIZER:+--tokenizer "$TOKENIZER"}
  python - <<'END'
from pathlib import Path
import numpy as np
from cable_attn.data.shards import Tokens
np.save("data/held-out.npy", Tokens(Path("data/books"), "test").slice(0, 2_400_000))
END
  ;;
wikitext)  # FILE FOLDER: wiki.test.tokens of WikiText-103, as tokens to read; TOKENIZER: that of the models
  python - "$1" "$2" "$TOKENIZER" <<'END'
import re, sys
from pathlib import Path
import numpy as np
from cable_attn.data.shards import import_tokens
from cable_attn.data.sources import HUB, join_lines
from cable_attn.data.tokenizers import find_tokenizer
file, folder, tokenizer = Path(sys.argv[1]), Path(sys.argv[2]), find_tokenizer(sys.argv[3], iter(()))
with file.open(encoding="utf-8") as lines:
    articles = [one.text for one in join_lines(lines, HUB["wikitext-103"].heading, "wikitext-103")]
articles = [re.sub(r" @(.)@ ", r"\1", text) for text in articles]  # 1 @,@ 000 and guest @-@ starring
tokens = [part for own in tokenizer.encode(articles) for part in ([tokenizer.separator], own)]
np.concatenate(tokens).astype("<u2").tofile(flat := folder.with_suffix(".bin"))
import_tokens(folder, {"test": flat}, tokenizer.vocab_size, tokenizer.separator, tokenizer)
END
  ;;
medium)
  cable train gpt2-medium-wikitext103 path=data/books steps=380 warmup_steps=40 report_to=none eval_every=100000 \
    save_every=100000 --out runs/medium ;;
decode)
  decode rope runs/medium rope@sdpa rope@cudnn --prune 1e-4 --compare 256 --text data/held-out.npy --jobs 12 --repeats 2 ;;
fp32)
  decode runs/medium --prune 1e-4 --compare 256 --text data/held-out.npy --lengths 4096 --precision fp32 --jobs 2 ;;
prefill)
  prefill rope rope@cudnn runs/medium --prune 1e-4 --text data/held-out.npy --jobs 4
  prefill rope runs/medium --prune 1e-4 --text data/held-out.npy --lengths 16384,65536,131072 --piece 8192 --jobs 3 ;;
encodings)  # the second four write out their biases while they read a prompt, which takes long
  fused="rope cable alibi cable-nw k-cable nope learnable sinusoidal kerple-log t5 fox"
  written="fire cope dapev2-cable dapev2-kerple"
  decode $fused --jobs 6
  decode rope $written --lengths 1024,4096,16384 --jobs 5
  prefill rope@cudnn $fused --jobs 6
  prefill rope@cudnn $written --lengths 1024,4096,16384 --jobs 5 ;;
batch)  # the longest one by one: each takes most of the memory
  names="rope cable alibi cable-nw k-cable nope learnable sinusoidal kerple-log t5 fox rope@sdpa"
  decode $names --batch 16 --lengths 1024,4096,16384 --jobs 4
  decode $names --batch 16 --lengths 65536 ;;
attention)
  cable bench attention --results "$OUT/attention.jsonl" ;;
training)
  cable bench train --jobs 6 --results "$OUT/training.jsonl" ;;
pruning)  # after the long study
  cable bench pruning runs/studies/long/cable-0 data/held-out.npy --results "$OUT/pruning.jsonl" ;;
conversion)
  study llama
  study conversion --jobs 4 ;;
books | long | layers | dape | small | small-wikitext | retrieval | rates | layers-novels | dape-novels | long-novels | short-novels | wikipedia)
  study "$part" "$@" ;;
*)
  echo "no part $part" >&2
  exit 2 ;;
esac
