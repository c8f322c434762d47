//! Sizes at which the Hopper kernel distributes its work differently than at the suite's sizes.

use super::backends::gpu::{CHOICES, Gpu};
use super::backends::gpu_rows::rows;
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Head, PerturbedArgmax, Plan, Samples};
use flash_sampling_cuda::KernelChoice;

/// Not a multiple of 4, because a call of Philox makes the words of 4 tokens.
const FIRST_TOKEN: usize = 5;

/// The number of rows that are compared with the reference, one of each kind.
const JUDGED: usize = 6;

/// Samples the first `count` rows of a problem for each count. All kernels must have the same bits on all rows, and the
/// reference's bits on the first [`JUDGED`] rows.
fn check(size: Size, counts: &[usize]) {
    let Some(_) = Gpu::TILED.device() else { return };
    let problem = Problem::integers(size, DType::BF16, DType::BF16, 77);
    let head = Head::shard(problem.weight.matrix(), FIRST_TOKEN, FIRST_TOKEN + size.vocab).unwrap();
    let plan = Plan { max_rows: size.rows, max_draws: 3, ..Plan::default() };
    let rows = rows(size.rows);
    let (mut want, mut out) = (Samples::new(), Samples::new());
    let judged = problem.input().row_range(0..JUDGED);
    Reference::new(head, plan, ReferenceVariant::Tiled).sample(judged, &rows[..JUDGED], &mut want).unwrap();
    let want = RowBits::all(&want);
    let mut all = Vec::new();
    for choice in [KernelChoice::Portable].into_iter().chain(CHOICES) {
        let mut sampler = Gpu::Tiled(choice).build(head, plan).unwrap();
        if all.is_empty() {
            sampler.sample(problem.input(), &rows, &mut out).unwrap();
            all = RowBits::all(&out);
            assert_eq!(all[..JUDGED], want, "{size:?}, {choice:?}");
        }
        for &count in counts {
            sampler.sample(problem.input().row_range(0..count), &rows[..count], &mut out).unwrap();
            let found = RowBits::all(&out);
            assert_eq!(found.len(), count);
            let first = (0..count).find(|&r| found[r] != all[r]).map(|r| (r, &found[r], &all[r]));
            assert!(first.is_none(), "{size:?}, {count} rows, {choice:?}: row, found, wanted {first:?}");
        }
    }
}

/// Uses hidden sizes from 8192, at which blocks take tiles in a fixed cycle if each has at least one whole tile: from
/// 16,896 tokens on 132 multiprocessors. With their draws, these rows use every tile size of the kernel.
#[test]
fn long_rows_of_the_weight_have_the_reference_bits() {
    check(Size::new(200, 20_011, 8192), &[1, 10, 20, 40, 64, 100, 200]);
}

/// Uses up to 256 rows, each with several draws, so that tiles have many sizes.
#[test]
fn large_batches_have_the_reference_bits() {
    check(Size::new(256, 12_007, 2880), &[64, 80, 100, 140, 256]);
}

/// Uses a shorter hidden size and fewer rows.
#[test]
fn small_batches_have_the_reference_bits() {
    check(Size::new(40, 6007, 1600), &[22, 30, 40]);
}
