# Functions shared by the other scripts, which source this file. They find or create a Python environment, prepare data, and start
# torchrun through megazero.launch, which makes its error messages readable.
# A relative path that the user gives, or that a script defaults to, counts from the folder in which the script was started.
# Variables that every script uses, with their defaults:
#   PYTHON          the interpreter; if unset, .venv/ of the repository, else python3 if it has the packages, else a new .venv/
#   NPROC           ranks on this node (all GPUs; 2 on a machine without one)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT    several nodes; or NNODES, RDZV_ENDPOINT=host:port and RDZV_ID for torchrun's c10d rendezvous
#   CHECK_ONLY      if set, flags and files are checked, for all NNODES x NPROC ranks, and nothing is started
#   MAX_RESTARTS    one node only: how often all ranks are restarted after one has failed (0); they continue from the last checkpoint

set -euo pipefail
REPO=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
{ : 3>&1; } 2>/dev/null || exec >/dev/null  # a daemon may start a script without an output (`>&-`), as it may a job
export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}  # as if megazero were installed
export PYTHONSAFEPATH=1  # a random.py where the user stands is not Python's (3.11 on)

# fail MESSAGE: ends the script with this line
fail() {
  echo "error: $1" >&2
  exit 2
}

# has_packages PYTHON MODULE...: whether the interpreter is new enough and finds all modules, and torch, if it is among them, is 2.8 or newer. It
# does not import them, because that takes seconds.
has_packages() {
  local python=$1
  shift
  "$python" - "$@" >/dev/null 2>&1 <<'PYTHON'
import importlib.metadata, importlib.util, sys
sys.path[:] = filter(None, sys.path)  # what PYTHONSAFEPATH does, for 3.10
found = all(map(importlib.util.find_spec, sys.argv[1:]))
old = "torch" in sys.argv and found and tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 8)
sys.exit(not found or old or sys.version_info < (3, 10))
PYTHON
}

# use_python EXTRA MODULE...: sets PYTHON to an interpreter that has the modules; if necessary, installs the extra into .venv/
use_python() {
  local extra=$1
  shift
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is no command that can be run in $PWD. Name a Python by its full path, or unset it."
    has_packages "$PYTHON" "$@" || fail "PYTHON=$PYTHON is older than 3.10, or lacks torch 2.8 or some of: $*. Unset PYTHON, or run, in $REPO: $PYTHON -m pip install -c constraints.txt -e '.[$extra]'"
    return
  fi
  for PYTHON in "$REPO/.venv/bin/python" python3; do
    ! has_packages "$PYTHON" "$@" || return 0
  done
  [ -x "$REPO/.venv/bin/python" ] || has_packages python3 || fail "python3 is missing or older than 3.10. Install a newer one, or name one by PYTHON."
  # One run at a time, also of several nodes. The lock ends with this process even if that is killed; Python has it on macOS too.
  exec 9>>"$REPO/constraints.txt" || fail "no Python has the needed packages, and $REPO cannot be written to install them there. Name one that has them by PYTHON."
  python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || echo "warning: $REPO cannot be locked: let no other run install there now" >&2
  PYTHON=$REPO/.venv/bin/python
  has_packages "$PYTHON" "$@" || (cd "$REPO" && make_venv "$extra")
  exec 9>&-
}

# make_venv EXTRA: in the repository, installs the extra into .venv/, which it makes with python3 if there is none, or one whose Python is gone.
# If python3 has a PyTorch, .venv/ uses that: it suits the GPUs of the machine, and another one would take gigabytes.
make_venv() {
  local pin=constraints.txt
  echo "no Python environment with the needed packages yet: installing them into .venv (a minute or two)"
  if [ ! -x .venv/bin/python ]; then
    python3 -m venv --clear .venv || { rm -rf .venv; fail "python3 cannot make .venv: it says why above. Half of it would not do, and was removed."; }
    if has_packages python3 torch; then
      echo "  with the PyTorch of $(command -v python3)"
      python3 -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])' \
        >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/python3_torch.pth"
    fi
  fi
  has_packages .venv/bin/python pip || fail "$PWD/.venv has no pip, or is older than Python 3.10. Delete that folder, or install '.[$1]' into it."
  ! has_packages .venv/bin/python torch || pin=
  .venv/bin/python -m pip install --quiet --disable-pip-version-check ${pin:+-c "$pin"} -e ".[$1]"
}

JOB_PACKAGES=(torch numpy safetensors sentencepiece tiktoken tensorboard tqdm matplotlib tokenizers)

# launch SCRIPT ARG...: replaces this process with torchrun on this node, for a script that uses megazero.entry. Signals are passed to the
# ranks, which finish their step, save and exit 0.
launch() {
  local where=() name
  # bash treats a value that is not a number as false, and each node would then train by itself
  for name in NNODES NODE_RANK MAX_RESTARTS; do
    [[ ${!name:-0} =~ ^[0-9]+$ ]] || fail "$name=${!name} must be a number, or unset."
  done
  # Otherwise torchrun would wait for a job that started without this node or never starts, or train alone if NNODES was forgotten.
  if [ -z "${NNODES:-}" ] && [[ ! ${RDZV_ENDPOINT:-localhost} =~ ^(localhost|127\.) ]]; then  # no other node can reach those
    fail "RDZV_ENDPOINT=$RDZV_ENDPOINT needs NNODES, the number of nodes that meet there (1 for this one alone)."
  fi
  if [ -z "${RDZV_ENDPOINT:-}" ] && [ "${NODE_RANK:-0}" -ge "${NNODES:-1}" ]; then
    fail "NODE_RANK=${NODE_RANK:-0} must be below NNODES=${NNODES:-1}: nodes are numbered from 0."
  fi
  # After one node loses a rank, torchrun restarts the ranks of the other nodes at another time or not at all, and they do not meet.
  if [ "${NNODES:-1}" -gt 1 ] && [ "${MAX_RESTARTS:-0}" != 0 ]; then
    fail "MAX_RESTARTS=$MAX_RESTARTS is for one node, and NNODES is $NNODES. Let the batch system start the whole job again (Slurm: --requeue), or unset it."
  fi
  # One process checks flags and files before all ranks start, and writes the number of ranks to descriptor 3 (megazero.entry).
  { NPROC=$(MEGAZERO_CHECK=3 NPROC=${NPROC:-} "$PYTHON" "$@" 3>&1 >&4); } 4>&1
  [ -n "$NPROC" ] && [ -z "${CHECK_ONLY:-}" ] || exit 0  # without NPROC, it has printed --help
  if [ -n "${RDZV_ENDPOINT:-}" ]; then
    where=(--nnodes "${NNODES:-1}" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-megazero}")
  elif [ "${NNODES:-1}" -gt 1 ] || [ -n "${MASTER_PORT:-}" ]; then
    where=(--nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
    [ "${NODE_RANK:-0}" -ne 0 ] || check_port "${MASTER_PORT:-29500}"
  else
    where=(--standalone --nnodes 1)  # whatever PET_NNODES says
  fi
  # The agent, which the command `megazero` also runs on each node, keeps the terminal's Ctrl-C and the batch system's signals from
  # torchrun and passes them to the ranks (megazero/runner/processes.py).
  trap '' INT  # until the agent handles it: Python would print a traceback
  exec "$PYTHON" -m megazero.runner.agent "$PYTHON" -m megazero.launch "${where[@]}" --max-restarts "${MAX_RESTARTS:-0}" --nproc-per-node "$NPROC" "$@" </dev/null
}

# read_json ARG...: sets JSON_KEYS to the top-level keys that the JSON of the last --deepspeed_config among ARG... decides, "auto" left out
read_json() {
  local source=
  while [ $# -gt 0 ]; do
    case $1 in  # all names of the flag (megazero/config.py)
      --deepspeed[_-]config | --deepscale[_-]config) source=${2:-} ;;
      --deepspeed[_-]config=* | --deepscale[_-]config=*) source=${1#*=} ;;
    esac
    shift
  done
  JSON_KEYS=
  # -I: Python's own modules would else be looked for in megazero/ first, which has a logging.py too
  [ -z "$source" ] || JSON_KEYS=$("$PYTHON" -I "$REPO/megazero/json_source.py" "$source")
}

# json_has KEYS: whether one of the keys (a|b) is in JSON_KEYS
json_has() {
  local pattern=" ($1) "
  [[ " $JSON_KEYS " =~ $pattern ]]
}

# precision_flag ARG...: sets PRECISION_FLAG to the flag for PRECISION (bf16, fp16, or fp32, which has no flag). If PRECISION is unset, ARG... or
# their JSON file decide; if they do not, it is bf16, fp16 on GPUs older than Ampere, which have no bf16, or fp32 without a GPU, because many
# CPUs compute in 16 bits ten times slower.
precision_flag() {
  local precision=${PRECISION:-} argument
  PRECISION_FLAG=
  if [ -z "$precision" ]; then
    for argument in "$@"; do
      case $argument in --bf16 | --fp16 | --no-bf16 | --no-fp16) return 0 ;; esac
    done
    read_json "$@"
    ! json_has "bf16|bfloat16|fp16" || return 0
    precision=$("$PYTHON" -c '
import torch
if not torch.cuda.is_available():
    print("fp32")
else:
    print("bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16")')
  fi
  precision=${precision#--}
  [ "$precision" = fp32 ] || PRECISION_FLAG=--$precision
}

# check_port PORT: ends with one clear line, instead of torchrun's traceback, if the port cannot be used
check_port() {
  "$PYTHON" - "$1" <<'PYTHON'
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if int(sys.argv[1]) == 0:  # bind would take any free port, and the ranks would look for each other at 0
            raise ValueError("a port is a number from 1 to 65535")
        probe.bind(("", int(sys.argv[1])))
    except (OSError, ValueError, OverflowError) as error:
        sys.exit(f"error: MASTER_PORT={sys.argv[1]} cannot be used on this host ({error}). Choose a free one, or unset it on a single node.")
PYTHON
}

# prepare_sample_data: sets TRAIN_DATA and TOKENIZER_ARGS to a small corpus of real English text, which is made once on this machine
prepare_sample_data() {
  # Another size is another corpus, and another run: its name becomes part of SAVE's.
  local text=${DATA_DIR:-data/sample}/sample${SAMPLE_MB:+_${SAMPLE_MB}MB}
  local corpus=$text${SAMPLE_VOCAB_SIZE:+_$SAMPLE_VOCAB_SIZE}
  [ -f "$text.jsonl" ] || "$PYTHON" -m data_tools sample_corpus --output "$text.jsonl" --max-mb "${SAMPLE_MB:-9}"
  [ -f "$corpus.model" ] || "$PYTHON" -m data_tools train_tokenizer --input "$text.jsonl" --vocab-size "${SAMPLE_VOCAB_SIZE:-4096}" --model-prefix "$corpus"
  TOKENIZER_ARGS=(--tokenizer-type SentencePieceTokenizer --tokenizer-path "$corpus.model")
  [ -f "${corpus}_text_document.idx" ] || "$PYTHON" -m data_tools tokenize --input "$text.jsonl" --output-prefix "$corpus" \
    --append-eod "${TOKENIZER_ARGS[@]}"
  TRAIN_DATA=${corpus}_text_document
}

# corpora NAMES: sets CORPORA to the words of NAMES, or to NAMES as a whole if it is one corpus with a space in its path
corpora() {
  if [ -f "$1" ] || [ -f "$1.idx" ] || [ -f "$1_text_document.idx" ]; then CORPORA=("$1"); else CORPORA=($1); fi
}

# tokenizer_args: sets TOKENIZER_ARGS from TOKENIZER_TYPE, TOKENIZER_PATH, VOCAB_FILE and MERGE_FILE, as far as they are set
tokenizer_args() {
  TOKENIZER_ARGS=(--tokenizer-type "${TOKENIZER_TYPE:-GPT2BPETokenizer}")
  [ -z "${TOKENIZER_PATH:-}" ] || TOKENIZER_ARGS+=(--tokenizer-path "$TOKENIZER_PATH")
  [ -z "${VOCAB_FILE:-}" ] || TOKENIZER_ARGS+=(--vocab-file "$VOCAB_FILE")
  [ -z "${MERGE_FILE:-}" ] || TOKENIZER_ARGS+=(--merge-file "$MERGE_FILE")
}
