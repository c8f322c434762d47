//! The laws of independent rows: a result depends on neither other rows, nor the number of draws, nor earlier calls.

use crate::data::hash;
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::{RowBits, Trial};
use flash_sampling_core::{DType, Plan, RowParams, Samples};

const MAX_ROWS: usize = 256;

/// Returns row `r` of a batch of rows with different parameters.
fn row(r: usize) -> RowParams<'static> {
    let base = RowParams { seed: 1000 + r as u64 / 5, position: r as u64 % 5, ..RowParams::default() };
    match r % 4 {
        0 => RowParams { logprobs: Some(2), ..base },
        1 => RowParams { temperature: 0.0, ..base },
        2 => RowParams { temperature: 0.6, draws: 3, ..base },
        _ => RowParams { logit_bias: &[(1, 4.0), (9, -1.0)], first_draw: 17, draws: 2, ..base },
    }
}

/// Selects `rows` of 256 rows in a pseudo-random order.
fn scattered(rows: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..MAX_ROWS).collect();
    order.sort_by_key(|&r| hash(seed, r as u64));
    order.truncate(rows);
    order
}

/// Uses real inputs, because the order of summation must not depend on the batch.
pub(super) fn rows_do_not_depend_on_the_batch(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let plan = Plan { max_rows: MAX_ROWS, max_draws: 3, max_logprobs: Some(2), canonical: false };
    let pairs =
        [(DType::BF16, DType::BF16), (DType::F32, DType::F32), (DType::F16, DType::BF16), (DType::BF16, DType::F32)];
    for (i, (weight, hidden)) in pairs.into_iter().enumerate() {
        let problem = Problem::gaussian(Size::new(MAX_ROWS, 611, 75), weight, hidden, 21);
        let params: Vec<RowParams<'_>> = (0..MAX_ROWS).map(row).collect();
        let mut sampler = trial.sampler(problem.head(), plan)?;
        let mut out = Samples::new();
        sampler.sample(problem.input(), &params, &mut out)?;
        let full = RowBits::all(&out);
        let mut compared = 0;
        let alone = scattered(24, 1).into_iter().map(|r| vec![r]);
        let sizes = [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256];
        for rows in alone.chain(sizes.into_iter().map(|n| scattered(n, n as u64))) {
            let batch = problem.hidden.select(&rows);
            let batch_params: Vec<RowParams<'_>> = rows.iter().map(|&r| params[r]).collect();
            sampler.sample(batch.matrix(), &batch_params, &mut out)?;
            for (place, &r) in rows.iter().enumerate() {
                let found = RowBits::of(&out, place);
                ensure!(
                    found == full[r],
                    "{} x {}: row {r} at place {place} of {} has {found:?}, in the batch of 256 {:?}",
                    weight.name(),
                    hidden.name(),
                    rows.len(),
                    full[r]
                );
            }
            compared += rows.len();
        }
        report.agreed(format!("rows in batches of 1 to 256, {} x {}", weight.name(), hidden.name()), compared);
        (trial.progress)((i + 1) as f64 / pairs.len() as f64);
    }
    Ok(())
}

pub(super) fn draws_do_not_depend_on_how_many_are_asked(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    let problem = Problem::gaussian(Size::new(3, 517, 40), DType::BF16, DType::BF16, 22);
    let plan = Plan { max_rows: 3, max_draws: 40, ..Plan::default() };
    let mut sampler = trial.sampler(problem.head(), plan)?;
    let mut draws = |first_draw, draws| -> Result<Vec<Vec<(u32, u32)>>, Broken> {
        let rows: Vec<RowParams<'_>> =
            (0..3).map(|r| RowParams { seed: r, position: 9, first_draw, draws, ..RowParams::default() }).collect();
        let mut out = Samples::new();
        sampler.sample(problem.input(), &rows, &mut out)?;
        out.iter().map(|row| Ok(row?.draws.iter().map(|d| (d.token, d.score.to_bits())).collect())).collect()
    };
    let all = draws(5, 40)?;
    let mut compared = 0;
    for (first, count) in [(0, 1), (1, 1), (39, 1), (0, 2), (3, 7), (16, 16), (7, 33)] {
        for (r, part) in draws(5 + first, count)?.iter().enumerate() {
            let want = &all[r][first as usize..(first + count) as usize];
            ensure!(part == want, "row {r}, draws {first} to {}: {part:?} against {want:?}", first + count);
            compared += want.len();
        }
    }
    report.agreed("draws made in parts", compared);
    Ok(())
}

pub(super) fn results_do_not_depend_on_earlier_calls(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let problem = Problem::gaussian(Size::new(20, 700, 33), DType::F32, DType::F32, 23);
    let plan = Plan { max_rows: 20, max_draws: 3, max_logprobs: Some(2), canonical: false };
    let params: Vec<RowParams<'_>> = (0..20).map(row).collect();
    let call = |sampler: &mut dyn flash_sampling_core::PerturbedArgmax, rows: core::ops::Range<usize>| {
        let mut out = Samples::new();
        sampler.sample(problem.input().row_range(rows.clone()), &params[rows], &mut out)?;
        Ok::<_, Broken>(RowBits::all(&out))
    };
    let first = call(trial.sampler(problem.head(), plan)?.as_mut(), 4..11)?;
    let mut used = trial.sampler(problem.head(), Plan { max_rows: 23, max_draws: 9, ..plan })?;
    call(used.as_mut(), 0..20)?;
    call(used.as_mut(), 19..20)?;
    let mut out = Samples::new();
    let failed = used.sample(problem.input(), &params[..3], &mut out);
    ensure!(failed.is_err(), "three row parameters for 20 rows were accepted");
    let bad = [RowParams { temperature: f32::NAN, ..params[0] }, RowParams { mask: Some(&[]), ..params[1] }];
    used.sample(problem.input().row_range(0..2), &bad, &mut out)?;
    ensure!(out.iter().all(|row| row.is_err()), "a NaN temperature or an empty mask was accepted");
    let again = call(used.as_mut(), 4..11)?;
    ensure!(again == first, "after other calls {again:?}, from a new sampler {first:?}");
    // Reuse of `Samples` after larger results.
    used.sample(problem.input(), &params, &mut out)?;
    used.sample(problem.input().row_range(4..11), &params[4..11], &mut out)?;
    ensure!(RowBits::all(&out) == first, "reused results differ from fresh ones");
    report.agreed("rows from a used and from a new sampler", 2 * first.len());
    Ok(())
}
