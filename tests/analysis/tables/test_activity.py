"""The tables of the activity of a GPU."""

import pytest

from ebbtide.analysis.tables.activity import short_name


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
            "ncclKernel_AllReduce_RING_LL_Sum_float",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, "
            "at::native::CUDAFunctor_add<float>, at::detail::Array<"
            "char*, 3> >(int, at::native::CUDAFunctor_add<float>, "
            "at::detail::Array<char*, 3>)",
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, Array<char*, 3> "
            ">",
        ),
        (
            "void at::native::(anonymous namespace)::CatArray<float>(float*, f(int))",
            "CatArray<float>",
        ),
        ("ampere_sgemm_128x128_tn", "ampere_sgemm_128x128_tn"),
        ("(odd)", "(odd)"),
    ],
)
def test_kernels__are_named_without_namespaces_and_arguments(
    kernel: str, short: str
) -> None:
    assert short_name(kernel) == short
