//! Log-probabilities of rows of several blocks, and of many rows with the vocabulary of a language model.

use super::backends::gpu::{CHOICES, Gpu};
use super::backends::{assert_twice, reference};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, LogprobsMode, Plan, RowParams};

/// Uses rows of three blocks, small enough for the sanitizers.
#[test]
fn logprobs_of_several_blocks_have_the_reference_bits() {
    let Some(_) = Gpu::TILED.device() else { return };
    let vocab = 20_003;
    let mut problem = Problem::integers(Size::new(6, vocab, 24), DType::BF16, DType::BF16, 97);
    problem.scale = Some(0.25);
    let mask: Vec<u32> = (0..vocab.div_ceil(32) as u32).map(|word| 0x8001_0040u32.rotate_left(word % 32)).collect();
    let processed = RowParams { seed: 98, temperature: 1.5, logprobs: Some(5), ranks: true, ..RowParams::default() };
    let raw = RowParams { logprobs_mode: LogprobsMode::Raw, ..processed };
    let masked = [processed, raw].map(|row| RowParams { mask: Some(&mask), ..row });
    let none = RowParams { mask: Some(&[]), logprobs: Some(0), ..raw };
    let rows = [processed, raw, masked[0], masked[1], RowParams { logprobs: Some(0), ..processed }, none];
    let plan = Plan { max_rows: 6, max_logprobs: Some(5), ..Plan::default() };
    let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
    for &choice in &CHOICES[..2] {
        assert_twice(&Gpu::Tiled(choice), &problem, plan, &rows, &want, &format!("{choice:?}"));
    }
}

/// Uses more rows than the 83 that fit into the workspace of stored logits, and copies single logits for up to 8 draws.
#[test]
fn raw_logprobs_of_more_rows_than_are_stored_at_once_have_the_reference_bits() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (count, vocab) = (100, 200_003);
    let mut problem = Problem::integers(Size::new(count, vocab, 24), DType::BF16, DType::BF16, 95);
    problem.scale = Some(0.25);
    let mask: Vec<u32> = (0..vocab.div_ceil(32) as u32).map(|word| 0x8001_0040u32.rotate_left(word % 32)).collect();
    let base = RowParams { seed: 96, logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..RowParams::default() };
    let row = |r: usize| {
        let row = RowParams { position: r as u64, ..base };
        match r % 12 {
            0 => RowParams { temperature: 0.0, ..row },
            1 => RowParams { temperature: 3.0, draws: 9, logprobs: Some(0), ..row },
            2 => RowParams { mask: Some(&mask), draws: 8, ..row },
            3 => RowParams { top_k: 20, ..row },
            4 => RowParams { top_p: 0.9, draws: 2, ..row },
            5 => RowParams { draws: 9, without_replacement: true, ..row },
            6 => RowParams { typical_p: 0.5, kept: true, ..row },
            7 => RowParams { logprobs_mode: LogprobsMode::Processed, ..row },
            8 => RowParams { temperature: f32::NAN, ..row },
            _ => row,
        }
    };
    let rows: Vec<_> = (0..count).map(row).collect();
    let plan = Plan { max_rows: count, max_draws: 9, max_logprobs: Some(3), canonical: false };
    let want = reference(&problem, plan, ReferenceVariant::Tiled, &rows);
    for &choice in &CHOICES[..2] {
        assert_twice(&Gpu::Tiled(choice), &problem, plan, &rows, &want, &format!("{choice:?}"));
    }
}
