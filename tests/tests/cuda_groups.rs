//! The suite on the grouped and online variants of the CUDA backend, and tests of these variants only.

mod backends;

use backends::gpu::Gpu;
use backends::gpu_rows::{rows, rows_of};
use backends::{GROUP, assert_twice, reference, same_in_batches};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_core::{DType, Plan};
use flash_sampling_cuda::{CudaError, CudaGrouped, CudaOnline};

suite!(grouped, Gpu::Grouped(GROUP));
suite!(online, Gpu::Online(GROUP));

#[test]
fn integer_inputs_have_the_reference_bits_for_every_group_and_batch() {
    let Some(_) = Gpu::Grouped(GROUP).device() else { return };
    // Vocabularies of 40 000 tokens make blocks that share groups, and groups that span many blocks.
    let sizes =
        [(1, 1, 1), (3, 64, 8), (8, 1000, 200), (16, 517, 65), (33, 40_000, 40), (64, 5000, 512), (256, 3001, 16)];
    for (count, vocab, hidden) in sizes {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let problem = Problem::integers(Size::new(count, vocab, hidden), dtype, dtype, 21);
            let rows = rows_of(count, vocab);
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            for group in [64, 512, 16_384] {
                for factory in [Gpu::Grouped(group), Gpu::Online(group)] {
                    let variant = factory.reference_variant(&problem.head()).unwrap();
                    let want = reference(&problem, plan, variant, &rows);
                    let what = format!("{factory:?}, {vocab} x {hidden}, {}", dtype.name());
                    assert_twice(&factory, &problem, plan, &rows, &want, &what);
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_batches_of_1_to_256() {
    let Some(_) = Gpu::Online(GROUP).device() else { return };
    let problem = Problem::gaussian(Size::new(256, 6011, 775), DType::BF16, DType::BF16, 21);
    let plan = Plan { max_rows: 256, max_draws: 3, ..Plan::default() };
    for factory in [Gpu::Grouped(128), Gpu::Online(128)] {
        same_in_batches(&factory, &problem, plan, &rows(256));
    }
}

#[test]
fn groups_that_are_no_multiple_of_64_are_refused() {
    let Some(device) = Gpu::Online(GROUP).device() else { return };
    let problem = Problem::integers(Size::new(1, 100, 8), DType::BF16, DType::BF16, 1);
    for size in [0, 1, 63, 100] {
        let grouped = CudaGrouped::new(problem.head(), Plan::default(), size, &device);
        assert_eq!(grouped.err(), Some(CudaError::GroupSize { size }));
        let online = CudaOnline::new(problem.head(), Plan::default(), size, &device);
        assert_eq!(online.err(), Some(CudaError::GroupSize { size }));
    }
}
