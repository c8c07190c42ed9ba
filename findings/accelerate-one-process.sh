#!/usr/bin/env bash
# in short (engines): Without a GPU `accelerate launch --num_processes 2` starts one process, without a word.
# torchrun --nproc_per_node 2 starts two.
# guessed: accelerate launch --num_processes 2, with --cpu or on a computer without a GPU, starts two processes that
# talk over gloo, as torchrun --nproc_per_node 2 does: its help calls it the number of processes launched in parallel
# seen: it starts the script once, with and without --cpu, and says nothing: an Accelerator there has num_processes 1.
# So a trial on a CPU of what several GPUs will run has another batch, and gathers nothing. --cpu with --multi_gpu is
# refused; under torchrun the same script has two
# with: accelerate 1.15.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q accelerate==1.15.0 torch==2.13.0
export HF_HOME=$work CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo  # no accelerate config of the user's
cat >script.py <<'EOF'
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
with open(f"process-{accelerator.process_index}", "w") as file:
    print("of", accelerator.num_processes, file=file)
accelerator.wait_for_everyone()
accelerator.end_training()
EOF
check() {  # the processes that a command is expected to start, and the command
    rm -f process-*
    "${@:2}" script.py >log 2>&1
    echo "$(basename "$2") ${*:3}: $(head -qn1 process-* | sort | uniq -c)"
    test "$(ls process-* | wc -l)" = "$1"
    for file in process-*; do test "$(cat "$file")" = "of $1"; done
}
check 1 venv/bin/accelerate launch --num_processes 2
check 1 venv/bin/accelerate launch --cpu --num_processes 2
venv/bin/accelerate launch -h | tr -s ' \n' ' ' | grep -q "total number of processes to be launched in parallel"
check 2 venv/bin/torchrun --nproc_per_node 2
