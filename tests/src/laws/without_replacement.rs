//! The laws of lists without replacement: Gumbel-top-k (Kool et al. 2019).

use crate::logits::{LogitShape, softmax};
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::statistics::Bins;
use crate::trial::{RowBits, Trial, drawn};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Draw, Knob, PerturbedArgmax, Plan, RowError, RowParams, Samples};

/// Returns whether the sampler draws lists. If it does not, checks that it refuses such rows by name.
fn supported(trial: &Trial<'_>, report: &mut LawReport) -> Result<bool, Broken> {
    if trial.capabilities()?.without_replacement {
        return Ok(true);
    }
    let problem = Problem::of_logits(&[0.0; 9], 1);
    let row = RowParams { draws: 2, without_replacement: true, ..RowParams::default() };
    let out = trial.sample(&problem, Plan { max_draws: 2, ..Plan::default() }, &[row])?;
    let error = out.row(0).err();
    ensure!(
        matches!(error, Some(RowError::Unsupported { knob: Knob::WithoutReplacement, .. })),
        "this sampler has no lists without replacement, but answers a row that asks for one with {error:?}"
    );
    report.agreed("lists without replacement refused by name", 1);
    Ok(false)
}

/// Enumerates the Plackett-Luce law of ordered lists of three: each next token has its probability among the remaining
/// tokens.
fn plackett_luce(p: &[f64]) -> Vec<f64> {
    let n = p.len();
    let mut law = vec![0.0; n * n * n];
    for a in 0..n {
        for b in (0..n).filter(|&b| b != a) {
            for c in (0..n).filter(|&c| c != a && c != b) {
                law[(a * n + b) * n + c] = p[a] * p[b] / (1.0 - p[a]) * p[c] / (1.0 - p[a] - p[b]);
            }
        }
    }
    law
}

pub(super) fn lists_follow_plackett_luce(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    if !supported(trial, report)? {
        return Ok(());
    }
    for (i, shape) in [LogitShape::Flat, LogitShape::Gaussian, LogitShape::TailHeavy].into_iter().enumerate() {
        let vocab = 6;
        let rows = 64;
        let problem = Problem::of_logits(&shape.logits(vocab, 600 + i as u64), rows);
        let law = plackett_luce(&softmax(&problem.raw_logits(0)));
        let mut sampler = trial.sampler(problem.head(), Plan { max_rows: rows, max_draws: 3, ..Plan::default() })?;
        let row = RowParams { draws: 3, without_replacement: true, ..RowParams::default() };
        let rows_of = |position| (0..rows as u64).map(|r| RowParams { seed: 600 + r, position, ..row }).collect();
        let draws = drawn(&mut *sampler, &problem, (0..trial.draws(300) as u64).map(rows_of))?;
        let list = |list: &[Draw]| list.iter().fold(0, |list, d| list * vocab + d.token as usize);
        let lists: Vec<_> = draws.chunks(3).map(list).collect();
        let outcome = Bins::of(&law, &lists, law.len(), |i| i).chi_square();
        report.p_value(format!("{shape:?}: ordered lists of 3 of 6, chi-square"), lists.len(), outcome);
        (trial.progress)((i + 1) as f64 / 3.0);
    }
    Ok(())
}

pub(super) fn lists_extend_the_single_draw(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    if !supported(trial, report)? {
        return Ok(());
    }
    let size = Size::new(5, 1201, 40);
    let problem = Problem::integers(size, DType::BF16, DType::BF16, 610);
    let plan = Plan { max_rows: 5, max_draws: 1201, ..Plan::default() };
    for draws in [1u32, 2, 17, 300, 1201] {
        let list = |r: u64| RowParams {
            seed: r,
            position: 5,
            first_draw: 4,
            draws,
            without_replacement: true,
            ..RowParams::default()
        };
        let rows: Vec<RowParams<'_>> = (0..5).map(list).collect();
        let singles: Vec<RowParams<'_>> =
            rows.iter().map(|&row| RowParams { draws: 1, without_replacement: false, ..row }).collect();
        let lists = trial.sample(&problem, plan, &rows)?;
        let singles = trial.sample(&problem, plan, &singles)?;
        let mut want = Samples::new();
        Reference::new(problem.head(), plan, ReferenceVariant::Tiled).sample(problem.input(), &rows, &mut want)?;
        for r in 0..5 {
            let list = lists.row(r)?.draws;
            ensure!(list.len() == draws as usize, "{} tokens instead of {draws}", list.len());
            ensure!(list[0] == singles.row(r)?.draws[0], "row {r}: the list begins with {:?}", list[0]);
            let mut tokens: Vec<u32> = list.iter().map(|d| d.token).collect();
            tokens.sort_unstable();
            tokens.dedup();
            ensure!(tokens.len() == list.len(), "row {r}: a token comes twice among {draws}");
            ensure!(list.is_sorted_by(|a, b| a.score >= b.score), "row {r}: scores do not fall");
            ensure!(
                RowBits::of(&lists, r) == RowBits::of(&want, r),
                "row {r}: a list of {draws} differs from the reference's"
            );
        }
        report.agreed(format!("lists of {draws} of 1201"), 5);
    }
    // Two tokens cannot make a list of three.
    let row = RowParams { draws: 3, without_replacement: true, mask: Some(&[0b101]), ..RowParams::default() };
    let out = trial.sample(&Problem::of_logits(&[0.0; 9], 1), plan, &[row])?;
    let error = out.row(0).err();
    ensure!(
        error == Some(RowError::SupportTooSmall { draws: 3, available: 2 }),
        "a list of 3 from 2 tokens gives {error:?}"
    );
    Ok(())
}
