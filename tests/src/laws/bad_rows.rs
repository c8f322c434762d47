//! The law of rows without a valid draw.

use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::tensor::Tensor;
use crate::trial::{RowBits, Trial};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Knob, Order, PerturbedArgmax, Plan, RowError, RowParams, Samples};

const SIZE: Size = Size::new(12, 389, 24);
const PLAN: Plan = Plan { max_rows: 12, max_draws: 3, max_logprobs: Some(2), canonical: false };

fn params(r: usize) -> RowParams<'static> {
    RowParams { seed: 900, position: r as u64, draws: 3, logprobs: Some(2), ..RowParams::default() }
}

/// Returns the expected error of each row from the reference. Errors do not depend on the variant, so `Tiled` serves
/// all.
fn reference(problem: &Problem, rows: &[RowParams<'_>]) -> Result<Vec<Option<RowError>>, Broken> {
    let mut out = Samples::new();
    Reference::new(problem.head(), PLAN, ReferenceVariant::Tiled).sample(problem.input(), rows, &mut out)?;
    Ok(out.iter().map(|row| row.err()).collect())
}

/// Runs the problem: rows must have the reference's errors, and rows without an error the bits of `good`. Returns the
/// number of errors.
fn compare(
    trial: &Trial<'_>,
    what: &str,
    problem: &Problem,
    rows: &[RowParams<'_>],
    good: &[RowBits],
) -> Result<usize, Broken> {
    let out = trial.sample(problem, PLAN, rows)?;
    let want = reference(problem, rows)?;
    ensure!(out.len() == rows.len(), "{what}: {} results for {} rows", out.len(), rows.len());
    for (r, want) in want.iter().enumerate() {
        let found = out.row(r).err();
        ensure!(found == *want, "{what}, row {r}: {found:?}, the reference says {want:?}");
        if want.is_none() {
            ensure!(RowBits::of(&out, r) == good[r], "{what}: row {r} is good, but a bad neighbour changes its bits");
        }
    }
    Ok(want.iter().flatten().count())
}

pub(super) fn bad_rows_are_errors_that_name_themselves(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    for (weight, hidden) in crate::trial::DTYPES {
        // Column 0 of the weight is positive, so an infinite hidden state gives infinite logits of one sign.
        let base = Problem::gaussian(SIZE, weight, hidden, 901);
        let spoiled = Problem::new(
            Tensor::from_fn(weight, SIZE.vocab, SIZE.hidden, |i, k| {
                let w = base.weight.row(i)[k];
                if k == 0 { w.abs() + 0.01 } else { w }
            }),
            base.hidden.clone(),
        );
        let rows: Vec<RowParams<'_>> = (0..SIZE.rows).map(params).collect();
        let good = RowBits::all(&trial.sample(&spoiled, PLAN, &rows)?);
        let bad = Tensor::from_fn(hidden, SIZE.rows, SIZE.hidden, |r, k| match (r, k) {
            (1, 7) | (11, 23) => f32::NAN,
            (4, 0) => f32::INFINITY,
            (5, 0) => f32::NEG_INFINITY,
            (8, 0) => f32::INFINITY,
            (8, 1) => f32::NEG_INFINITY,
            _ => base.hidden.row(r)[k],
        });
        let problem = Problem { hidden: bad, ..spoiled.clone() };
        let what = format!("{} x {}", weight.name(), hidden.name());
        let errors = compare(trial, &format!("bad hidden states, {what}"), &problem, &rows, &good)?;
        ensure!(errors == 5, "{errors} of 5 bad hidden states are errors");
        report.agreed(format!("rows beside bad hidden states, {what}"), SIZE.rows);
    }

    // One bad row of the weight: the error of every row of the batch names this token.
    for (token, value) in [(0, f32::NAN), (388, f32::NAN), (128, f32::INFINITY), (257, f32::NEG_INFINITY)] {
        let base = Problem::gaussian(SIZE, DType::BF16, DType::BF16, 902);
        let weight = Tensor::from_fn(DType::BF16, SIZE.vocab, SIZE.hidden, |i, k| {
            if (i, k) == (token, 3) { value } else { base.weight.row(i)[k] }
        });
        let problem = Problem { weight, ..base };
        let rows: Vec<RowParams<'_>> = (0..SIZE.rows).map(params).collect();
        let good = RowBits::all(&trial.sample(&problem, PLAN, &rows)?);
        compare(trial, &format!("weight {value} of token {token}"), &problem, &rows, &good)?;
        report.agreed(format!("rows over weight {value} of token {token}"), SIZE.rows);
    }

    // Rows without any allowed token, among valid rows.
    let problem = Problem::gaussian(SIZE, DType::F32, DType::F32, 903);
    let mut rows: Vec<RowParams<'_>> = (0..SIZE.rows).map(params).collect();
    let good = RowBits::all(&trial.sample(&problem, PLAN, &rows)?);
    let banned: Vec<(u32, f32)> = (0..SIZE.vocab as u32).map(|t| (t, f32::NEG_INFINITY)).collect();
    let beyond = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, !0u32 << 5];
    rows[2].mask = Some(&[]);
    rows[5].mask = Some(&[0; 13]);
    rows[6].logit_bias = &banned;
    rows[7].mask = Some(&beyond);
    rows[9].mask = Some(&[0]);
    rows[9].temperature = 0.0;
    rows[10].temperature = f32::NAN;
    rows[11].logit_bias = &[(3, f32::MAX), (9, f32::MAX)];
    rows[11].temperature = 1e-30;
    let mut bad = 7;
    if trial.capabilities()?.knobs.contains(Knob::TopK) {
        // The temperature follows the filter, and scales the kept logits beyond float32.
        let tiny = RowParams { temperature: 1e-37, top_k: 2, order: Order::LlamaCpp, ..rows[3] };
        rows[3] = RowParams { logit_bias: &[(3, 40.0), (9, 50.0)], ..tiny };
        rows[8] = RowParams { position: 8, mask: Some(&[0b11]), logit_bias: &[(0, -50.0), (1, -60.0)], ..tiny };
        bad += 2;
    }
    let errors = compare(trial, "masked rows", &problem, &rows, &good)?;
    ensure!(errors == bad, "{errors} of {bad} rows without a token are errors");
    report.agreed("rows beside masked rows", SIZE.rows);

    // The head's bias makes every logit -inf.
    let dead = Problem { bias: Some(vec![f32::NEG_INFINITY; SIZE.vocab]), ..problem };
    let rows: Vec<RowParams<'_>> = (0..SIZE.rows).map(params).collect();
    ensure!(compare(trial, "all -inf", &dead, &rows, &good)? == SIZE.rows, "a row of -inf is no error");
    report.agreed("rows of -inf", SIZE.rows);
    Ok(())
}
