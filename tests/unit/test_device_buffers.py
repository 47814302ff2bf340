"""What llama.cpp says that it took of each device."""

from stoker.backends.device import Device
from stoker.backends.llama.binding import LogLine, buffer_bytes, sum_by_device

MIB = 2**20
FIRST, SECOND = Device("H100", "CUDA", "CUDA1"), Device("H100", "CUDA", "CUDA10")
LOG = """\
load_tensors: offloaded 33/33 layers to GPU
load_tensors:   CPU_Mapped model buffer size =   256.50 MiB
load_tensors:        CUDA1 model buffer size =  4096.00 MiB
load_tensors:       CUDA10 model buffer size =  1024.00 MiB
llama_context:  CUDA_Host  output buffer size =     2.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =   512.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =    64.00 MiB
llama_memory_recurrent:      CUDA1 RS buffer size =     8.00 MiB
sched_reserve:      CUDA1 compute buffer size =   304.25 MiB
sched_reserve:  CUDA_Host compute buffer size =    16.00 MiB
llama_adapter_lora_init_impl:      CUDA1 LoRA buffer size =     4.00 MiB
"""


def lines(text):
    """What a native call logged."""
    return [LogLine(is_error=False, text=line.strip()) for line in text.splitlines()]


def test_each_buffer_counts_on_the_device_that_it_is_named_after():
    """SPEC M9: by line of the ledger; what no device holds is the machine's."""
    assert buffer_bytes(lines(LOG), (FIRST, SECOND)) == {
        "": {"weights": 256 * MIB + MIB // 2, "compute": 18 * MIB},
        "CUDA1": {
            "weights": 4096 * MIB,
            "kv": 584 * MIB,
            "compute": 304 * MIB + MIB // 4,
            "adapters": 4 * MIB,
        },
        "CUDA10": {"weights": 1024 * MIB},
    }


def test_matrices_that_are_split_by_rows_count_in_equal_parts():
    """SPEC M9: the library says how much all devices of a kind hold of them, not which."""
    other = Device("card", "Vulkan", "Vulkan0")
    text = "load_tensors:   CUDA_Split model buffer size =   100.00 MiB"
    part = {"weights": 50 * MIB}
    assert buffer_bytes(lines(text), (FIRST, other, SECOND)) == {"CUDA1": part, "CUDA10": part}


def test_buffers_of_a_device_without_memory_of_its_own_are_the_machines():
    """SPEC M9: an integrated device's count once."""
    unified = Device("M3", "Metal", "MTL0", is_integrated=True)
    text = "load_tensors:  MTL0_Mapped model buffer size =   100.00 MiB"
    assert buffer_bytes(lines(text), (unified,)) == {"": {"weights": 100 * MIB}}
    mapped = Device("card", "CUDA", "MTL0")
    assert buffer_bytes(lines(text), (mapped,)) == {"MTL0": {"weights": 100 * MIB}}


def test_parts_of_a_model_add_up_by_device_and_line():
    """SPEC M9: weights, contexts, adapters, a projector and a draft model."""
    parts = {"a": {"weights": 1, "kv": 2}}, {"a": {"kv": 3}, "b": {}}, {}
    assert sum_by_device(*parts) == {"a": {"weights": 1, "kv": 5}, "b": {}}
