"""From files to launches: which command it is, how many ranks, mappings, and what is refused."""

import json

import pytest

from labkit.errors import InputError
from labkit.importers.launch import known_program, read_launch
from labkit.importers.shell import gaps

MODEL = "--num-layers 2 --hidden-size 64"
RANKS = "ranks or nodes; it should be from 1 to 1048576"
ARGUMENTS = ("--num-layers", "2", "--hidden-size", "64")


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        (f"torchrun --nproc_per_node 8 --nnodes=2 pretrain_gpt.py {MODEL}", 16),
        (f"torchrun --nproc-per-node=4 /opt/pretrain_gpt.py {MODEL}", 4),
        (f"torchrun pretrain_gpt.py {MODEL}", 1),
        (f"python -u -m torch.distributed.run --nproc_per_node 8 pretrain_gpt.py {MODEL}", 8),
        (f"N=2; G=4\nsrun -l torchrun --nnodes $N --nproc-per-node $G pretrain_gpt.py {MODEL} 2>&1 | tee log", 8),
        (f"export WORLD_SIZE=32\npython pretrain_gpt.py {MODEL}", 32),
        (f"python pretrain_gpt.py {MODEL}", None),
        (MODEL, None),
        (f'cmd="python -u pretrain_gpt.py \\\n {MODEL}"\nsrun -N 4 bash -c "${{cmd}}"', None),
        (f'run="torchrun --nproc_per_node 2 pretrain_gpt.py {MODEL}"\necho "$run"\neval $run', 2),
        (f"#SBATCH --nodes=4 --ntasks-per-node=8\n#SBATCH -t 1\nsrun -l python pretrain_gpt.py {MODEL}", 32),
        (f"srun --ntasks 16 python pretrain_gpt.py {MODEL}", 16),
        (f'#SBATCH -N 2\nsrun -n 6 sh -c "python pretrain_gpt.py {MODEL}"', 6),
        (f"#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {MODEL}", 16),
        (f"if [ $RANK = 0 ]; then echo hi; fi\npip install x\ntorchrun --nproc_per_node 2 train.py {MODEL}", 2),
        (f"python tools/preprocess_data.py --input x\ntorchrun --nproc_per_node 2 pretrain_gpt.py {MODEL}", 2),
    ],
)
def test_finds_the_launch_and_its_ranks(script: str, ranks: int | None) -> None:
    launch = read_launch(script, "run.sh")
    assert (launch.arguments, launch.world_size, launch.unknown_world) == (ARGUMENTS, ranks, "")


def test_ranks_that_are_not_known_say_why() -> None:
    launch = read_launch(f"torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py {MODEL}", "run.sh")
    assert (launch.world_size, launch.unknown_world) == (None, "$SLURM_NNODES, which is not set")
    launch = read_launch(f"torchrun --nproc_per_node gpu pretrain_gpt.py {MODEL}", "run.sh")
    assert (launch.world_size, launch.unknown_world) == (None, "a machine that says what 'gpu' means")


def test_gaps_survive_a_shell_within() -> None:
    script = f'DIR=`pwd`\nrun="python -u ${{DIR}}/pretrain_gpt.py --save ${{DIR}}/out {MODEL}"\nsrun sh -c "${{run}}"'
    launch = read_launch(script, "run.sh")
    assert launch.program == "pretrain_gpt.py"
    assert launch.arguments[2:] == ARGUMENTS
    assert gaps(launch.arguments[1]) == ["what `pwd` prints, and nothing is run here"]


def test_row_of_a_functional_test() -> None:
    row = {
        "megatron_args": {
            "bf16": True,
            "sequence-parallel": False,
            "lr": 1e-05,
            "spec": "[a.b c]",
            "moe-layer-freq": "([0]*4+[1]*9)",
            "data-path": "${DATA_PATH}/x",
            "recompute-modules": ["moe_act", "mlp"],
        },
        "env_vars": {"NVTE_FUSED_ATTN": 0},
        "n_gpus": 8,
        "gpu": "H100",
    }
    launch = read_launch(json.dumps(row), "standard input")
    given = [word for word in launch.arguments if not gaps(word)]
    assert given == (
        "--bf16 --lr 1e-05 --spec a.b c --moe-layer-freq ([0]*4+[1]*9) --data-path --recompute-modules moe_act mlp"
    ).split(" ")
    assert (dict(launch.environment), launch.world_size, launch.gpu) == ({"NVTE_FUSED_ATTN": "0"}, 8, "H100")


def test_yaml_of_arguments() -> None:
    assert read_launch("# mine\nnum-layers: 2\n--hidden-size: 64\n", "standard input").arguments == ARGUMENTS


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "x: it launches no Python program with arguments that begin with --"),
        ("echo hello", "x: it launches no Python program with arguments that begin with --"),
        ("a\0b", "x: it is no text"),
        (
            f"python a.py {MODEL}\npython b.py --x 1",
            "x: lines 1, 2 each launch a program; leave one of them in the file",
        ),
        ('{"megatron_args": [1]}', "x: megatron_args: should be a mapping of names to values"),
        ('{"megatron_args": {}, "n_gpus": "8"}', "x: n_gpus: should be a number of GPUs"),
        ('{"num-layers": {"a": 1}}', "x: num-layers: should be a plain value or a list of them"),
        ('{"a": "x\\u0000y\\u0000"}', "x: a: should be a plain value or a list of them"),
        ('{"a": 1}\n{"a": 2}', "x: it has 2 rows; give one of them"),
        (f"a: &a [{'x, ' * 9999}]\nb: *a\nc: *a", "x: more than 16384 words of arguments"),
        (f"torchrun --nproc-per-node 0 a.py {MODEL}", f"x: the launcher starts 0 {RANKS}"),
        (f"srun --ntasks -2 python a.py {MODEL}", f"x: the launcher starts -2 {RANKS}"),
        ("eval \"eval 'eval x'\"", "x: it launches no Python program with arguments that begin with --"),
    ],
)
def test_what_is_no_launch_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        read_launch(text, "x")
    assert str(refused.value) == sentence


def test_other_programs_are_refused() -> None:
    with pytest.raises(InputError, match=r"^x: pretrain_t5\.py trains a model that labkit does not have; it has"):
        known_program("pretrain_t5.py", "x")
    known_program("my_training.py", "x")
