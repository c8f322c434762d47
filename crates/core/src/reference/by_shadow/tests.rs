//! Draws with a shadow have the bits of draws without.

use super::*;
use crate::error::RowError;
use crate::matrix::Matrix;
use crate::params::RowParams;
use crate::reference::{Reference, ReferenceVariant};
use crate::sampler::samples::{RowSample, Samples};
use crate::sampler::{PerturbedArgmax, Plan};
use crate::shadow::ShadowBuffer;

const VOCAB: usize = 600;
const COLS: usize = 40;

fn values(count: usize, salt: f32) -> Vec<f32> {
    (0..count).map(|i| ((i as f32 * 1.37 + salt).sin() * 1.3).powi(3)).collect()
}

/// The bits of all draws, or the error, of each row.
fn bits(head: Head<'_>, hidden: &[f32], rows: &[RowParams<'_>]) -> Vec<Result<Vec<[u32; 3]>, RowError>> {
    let plan = Plan { max_rows: rows.len(), max_draws: 5, max_logprobs: Some(2), canonical: false };
    let mut samples = Samples::new();
    let input = Matrix::new(hidden, rows.len(), COLS).unwrap();
    Reference::new(head, plan, ReferenceVariant::Tiled).sample(input, rows, &mut samples).unwrap();
    let bits = |row: RowSample<'_>| {
        let bits = row.draws.iter().map(|draw| [draw.token, draw.score.to_bits(), draw.logit.to_bits()]);
        bits.collect()
    };
    samples.iter().map(|row| row.map(bits)).collect()
}

/// Rows with every kind of parameters that a draw by bounds supports, and two rows that need all logits.
fn rows(position: u64, mask: &[u32]) -> [RowParams<'_>; 8] {
    let row = RowParams { seed: 3, position, ..RowParams::default() };
    [
        row,
        RowParams { temperature: 0.0, ..row },
        RowParams { temperature: 0.3, draws: 5, ..row },
        RowParams { draws: 4, without_replacement: true, first_draw: 2, ..row },
        RowParams { mask: Some(mask), temperature: 1.5, ..row },
        RowParams { logit_bias: &[(3, 2.5), (77, f32::NEG_INFINITY)], ..row },
        RowParams { top_k: 3, ..row },
        RowParams { logprobs: Some(2), ..row },
    ]
}

fn mask() -> Vec<u32> {
    (0..VOCAB.div_ceil(32) as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect()
}

#[test]
fn draws_of_the_reference_with_a_shadow_are_those_without() {
    let (floats, bias, mask) = (values(VOCAB * COLS, 0.4), values(VOCAB, 0.9), mask());
    let weight = Matrix::new(&floats, VOCAB, COLS).unwrap();
    let buffer = ShadowBuffer::new(&weight).unwrap();
    let head = Head::new(weight).unwrap();
    let capped = head.with_bias(&bias).unwrap().with_soft_cap(3.0).unwrap().with_scale(1.5).unwrap();
    for head in [head, capped, capped.slice(100..333)] {
        let shadow = buffer.shadow().row_range(head.tokens().start as usize..head.tokens().end as usize);
        for position in 0..40 {
            let (hidden, rows) = (values(8 * COLS, position as f32), rows(position, &mask));
            let found = bits(head.with_shadow(shadow).unwrap(), &hidden, &rows);
            assert_eq!(found, bits(head, &hidden, &rows), "position {position}");
        }
    }
}

#[test]
fn few_tokens_of_a_draw_have_a_logit() {
    let floats = values(VOCAB * COLS, 0.4);
    let weight = Matrix::new(&floats, VOCAB, COLS).unwrap();
    let buffer = ShadowBuffer::new(&weight).unwrap();
    let head = Head::new(weight).unwrap().with_shadow(buffer.shadow()).unwrap();
    let sampler = Reference::new(head, Plan::default(), ReferenceVariant::Tiled);
    let row = RowParams { seed: 3, ..RowParams::default() };
    let row = row.check(&[], &sampler.capabilities(), &sampler.plan(), VOCAB as u32).unwrap();
    let raw = possible_winners(&head, &row, &values(COLS, 1.0)).unwrap();
    let computed = raw.iter().filter(|logit| logit.is_finite()).count();
    assert!((1..VOCAB / 10).contains(&computed), "{computed}");
}

#[test]
fn an_invalid_weight_is_the_error_of_a_draw_without_a_shadow() {
    let mask = mask();
    for (bad, token) in [(f32::NAN, 5), (f32::INFINITY, 64)] {
        let mut floats = values(VOCAB * COLS, 0.4);
        floats[token * COLS] = bad;
        let weight = Matrix::new(&floats, VOCAB, COLS).unwrap();
        let buffer = ShadowBuffer::new(&weight).unwrap();
        let head = Head::new(weight).unwrap();
        let (hidden, rows) = (values(8 * COLS, 1.0), rows(0, &mask));
        let found = bits(head.with_shadow(buffer.shadow()).unwrap(), &hidden, &rows);
        assert!(found[4].is_err(), "token {token}");
        assert_eq!(found, bits(head, &hidden, &rows), "token {token}");
    }
}

/// The negative control: with errors of 0, some draws differ.
#[test]
fn draws_of_the_reference_without_the_errors_of_the_shadow_differ() {
    let (floats, mask) = (values(VOCAB * COLS, 0.4), mask());
    let weight = Matrix::new(&floats, VOCAB, COLS).unwrap();
    let buffer = ShadowBuffer::new(&weight).unwrap();
    let shadow = buffer.shadow();
    let shadow = Shadow::new(shadow.codes(), COLS, [shadow.scales(), &[0.0; VOCAB], shadow.norms()]).unwrap();
    let head = Head::new(weight).unwrap();
    let differs = (0..400).any(|position| {
        let (hidden, rows) = (values(8 * COLS, position as f32), rows(position, &mask));
        bits(head.with_shadow(shadow).unwrap(), &hidden, &rows) != bits(head, &hidden, &rows)
    });
    assert!(differs);
}
