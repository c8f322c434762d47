//! Few and many rows whose unfiltered winner is outside top-p. The launch that decides them distributes its blocks
//! among these rows.

use super::backends::assert_same;
use super::backends::gpu::{CHOICES, Gpu};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, PerturbedArgmax, Plan, RowParams, Samples};

const MOST: usize = 256;
const HIDDEN: usize = 40;

/// Uses different logits, hundreds of equal logits, and only equal logits, in rows that end within 16 bytes.
#[test]
fn rows_that_lose_their_plain_winner_have_the_reference_bits() {
    let Some(_) = Gpu::TILED.device() else { return };
    let plan = Plan { max_rows: MOST, ..Plan::default() };
    let (mut found, mut plain, mut want) = (Samples::new(), Samples::new(), Samples::new());
    let (mut all, mut open, mut again) = (0, 0, 0);
    for (i, vocab) in (0u64..).zip([4_601, 2_702, 131]) {
        let integers = |seed: u64, scale| {
            let size = Size::new(MOST, vocab, HIDDEN);
            let mut problem = Problem::integers(size, DType::BF16, DType::BF16, seed + i);
            problem.scale = Some(scale);
            problem
        };
        let (far, near) = (integers(110, 0.25), integers(120, 0.031_25));
        let equal = Problem::new(near.weight.clone(), Tensor::from_fn(DType::BF16, MOST, HIDDEN, |_, _| 0.0));
        for (what, problem) in [("far", far), ("near", near), ("equal", equal)] {
            let mut reference = Reference::new(problem.head(), plan, ReferenceVariant::Tiled);
            let mut samplers: Vec<_> =
                CHOICES[..2].iter().map(|&choice| Gpu::Tiled(choice).build(problem.head(), plan).unwrap()).collect();
            let calls = [(1, 0.3, 1.0), (40, 0.05, 1.0), (70, 0.9, 0.7), (140, 0.5, 1.5), (256, 0.97, 1.0)];
            for (count, top_p, temperature) in calls {
                let row = |r| RowParams { seed: 130 + r, position: 3, temperature, ..RowParams::default() };
                let bare: Vec<_> = (0..count as u64).map(row).collect();
                let rows: Vec<_> = bare.iter().map(|row| RowParams { top_p, ..*row }).collect();
                let input = problem.input().row_range(0..count);
                reference.sample(input, &rows, &mut want).unwrap();
                for (choice, sampler) in CHOICES.iter().zip(&mut samplers) {
                    sampler.sample(input, &bare, &mut plain).unwrap();
                    sampler.sample(input, &rows, &mut found).unwrap();
                    let what = format!("{what}, {vocab} tokens, top-p {top_p}, {choice:?}, {count} rows");
                    assert_same(&found, &want, &what);
                    all += count;
                    again += found.iter().filter(|row| row.is_ok_and(|row| row.passes > 1)).count();
                    open += RowBits::all(&plain)
                        .iter()
                        .zip(&RowBits::all(&found))
                        .filter(|(plain, kept)| plain != kept)
                        .count();
                }
            }
        }
    }
    println!("of {all} rows {open} lost their plain winner, and {again} took another pass");
    assert!(open * 5 > all, "the test is to try open rows: {open} of {all}");
    assert!(again * 100 <= all, "{again} of {all} rows took another pass");
}
