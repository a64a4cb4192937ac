"""Which ranks form which groups, in worlds of 1 to 8 ranks cut in every possible way."""

import pytest
import torch
import torch.distributed as dist

from megazero import comm, mpu
from megazero.mpu.groups import check_model_parallel_size
from tests.ranks import run_ranks


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def every_size_case():
    world, rank = dist.get_world_size(), dist.get_rank()
    for size in divisors(world):
        groups = mpu.initialize_model_parallel(size)
        assert groups is mpu.get_groups() and mpu.model_parallel_is_initialized() and not mpu.is_unitialized()
        first = rank // size * size
        model_ranks = list(range(first, first + size))
        assert dist.get_process_group_ranks(groups.model) == model_ranks
        data_ranks = list(range(rank % size, world, size))
        assert dist.get_process_group_ranks(groups.data) == data_ranks
        assert groups.model_parallel_size == mpu.get_model_parallel_world_size() == size
        assert groups.data_parallel_size == mpu.get_data_parallel_world_size() == world // size
        assert groups.model_parallel_rank == mpu.get_model_parallel_rank() == rank % size
        assert groups.data_parallel_rank == mpu.get_data_parallel_rank() == rank // size
        assert mpu.get_model_parallel_src_rank() == mpu.get_tensor_model_parallel_src_rank() == first
        assert mpu.get_tensor_model_parallel_world_size() == size
        assert mpu.get_tensor_model_parallel_rank() == rank % size
        assert mpu.get_tensor_model_parallel_group() is mpu.get_model_parallel_group() is groups.model
        assert mpu.get_data_parallel_group() is groups.data and mpu.get_data_parallel_src_rank() == data_ranks[0]
        # The groups do what they say: each sums exactly its own members, in its own order.
        mine = torch.tensor([float(10**rank)], dtype=torch.float64)
        assert comm.all_reduced(mine, groups.model).item() == sum(10**r for r in model_ranks)
        assert comm.all_reduced(mine, groups.data).item() == sum(10**r for r in data_ranks)
        assert [int(x) for x in comm.all_gathered(torch.tensor([rank]), groups.model)] == model_ranks
        assert [int(x) for x in comm.all_gathered(torch.tensor([rank]), groups.data)] == data_ranks
        with pytest.raises(
            RuntimeError, match=rf"exist already, with model-parallel size {size}.*destroy_model_parallel"
        ):
            mpu.initialize_model_parallel(size)
        mpu.destroy_model_parallel()
        assert not mpu.model_parallel_is_initialized()
        comm.all_reduced(mine, groups.model)  # layers that hold a group outlive the reset
    with pytest.raises(
        ValueError, match=f"--model-parallel-size {world + 1} does not divide the world of {world} ranks? "
    ):
        mpu.initialize_model_parallel(world + 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_model_ranks_are_neighbours_and_data_ranks_strided(world_size):
    run_ranks(world_size, every_size_case)


def different_sizes_case():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=rf"initialize_model_parallel\({1 + rank}\) on rank {rank}, and another size"):
        mpu.initialize_model_parallel(1 + rank)


def test_ranks_that_give_different_sizes_are_refused():
    run_ranks(2, different_sizes_case, timeout_s=30)


def successive_case():
    before, made = len(dist.distributed_c10d._world.pg_names), []
    for _ in range(2):
        for size in (1, 2):
            made.append(mpu.initialize_model_parallel(size))
            mpu.destroy_model_parallel()
    assert made[:2] == made[2:] and made[0] != made[1]
    assert len(dist.distributed_c10d._world.pg_names) - before == 2, "a group has threads and sockets, and stays"
    dist.destroy_process_group(made[1].data)
    again = mpu.initialize_model_parallel(2)
    assert again.data_parallel_size == 1 and again != made[1], "a script may have destroyed one"


def test_groups_of_a_size_are_made_once():
    run_ranks(2, successive_case)


def world_case():
    assert mpu.initialize_model_parallel(1).data is comm.world()
    mpu.destroy_model_parallel()
    assert mpu.initialize_model_parallel(2).model is comm.world()
    mpu.destroy_model_parallel()
    other = mpu.initialize_model_parallel(1, timeout_s=7).data
    assert other is not comm.world() and comm.timeout_of(other) == 7


def test_a_group_of_all_ranks_is_the_world_if_its_time_limit_is():
    run_ranks(2, world_case)


def own_case():
    world, rank, new_group, made = dist.get_world_size(), dist.get_rank(), dist.new_group, []
    for size in (1, 2, world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                dist, "new_group", lambda ranks, **more: (made.append(list(ranks)), new_group(ranks, **more))[1]
            )
            groups = mpu.initialize_model_parallel(size)
        new = [group for group in (groups.data, groups.model) if group is not comm.world()]
        assert made == [dist.get_process_group_ranks(group) for group in new]
        made.clear()
        for group in (groups.data, groups.model):
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)  # as a script may: ours returns at once for one rank
            assert x.item() == sum(dist.get_process_group_ranks(group))
        mpu.destroy_model_parallel()


def test_a_rank_makes_its_own_groups_only():
    """Over NCCL every rank of the world enters the making of each of them."""
    run_ranks(4, own_case)


@pytest.mark.parametrize("size", ["2", 2.0, True, None])
def test_a_size_that_is_no_integer_is_refused(size):
    with pytest.raises(ValueError, match=f"the model-parallel size must be an integer, got {size!r}"):
        check_model_parallel_size(2, size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12])
def test_sizes_that_divide_the_world_are_accepted_and_no_others(world_size):
    for size in range(-1, 2 * world_size + 1):
        if size in divisors(world_size):
            check_model_parallel_size(world_size, size)
        else:
            with pytest.raises(ValueError, match=f"--model-parallel-size {size} ") as error:
                check_model_parallel_size(world_size, size)
            assert ", ".join(str(d) for d in divisors(world_size)) in str(error.value)


def test_getters_before_initialisation_say_what_to_call():
    names = [name for name in mpu.__all__ if name.startswith("get_") and name != "get_cuda_rng_tracker"]
    assert len(names) == 13
    for name in names:
        with pytest.raises(RuntimeError, match="initialize_model_parallel"):
            getattr(mpu, name)()


def test_initialisation_without_torch_distributed_says_what_to_call():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_distributed"):
        mpu.initialize_model_parallel(1)


def test_groups_are_frozen(one_rank):
    with pytest.raises(AttributeError):
        mpu.get_groups().model = comm.world()


def test_groups_end_with_their_world(one_rank):
    dist.destroy_process_group()
    assert mpu.is_unitialized() and not mpu.model_parallel_is_initialized()
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        mpu.get_groups()
    comm.init_distributed("gloo")
    assert mpu.initialize_model_parallel(1).data is comm.world()


def uneven_case():
    dist.new_group([0])  # the script's own: rank 0 is in one group more than the others
    dist.new_group([0, 1])
    groups = mpu.initialize_model_parallel(2)
    assert comm.all_reduced(torch.ones(1), groups.model).item() == 2
    assert comm.all_reduced(torch.ones(1), groups.data).item() == 2


def test_groups_are_made_whatever_groups_the_script_has_made():
    run_ranks(4, uneven_case)
