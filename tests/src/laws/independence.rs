//! The laws of independence: draws with different seed, position, draw index or tokens are independent.

use crate::logits::{LogitShape, softmax};
use crate::problem::Problem;
use crate::report::{Broken, LawReport};
use crate::statistics::{contingency, correlation, gumbel_cdf};
use crate::trial::{Trial, drawn, groups_of};
use flash_sampling_core::reference::log_mass;
use flash_sampling_core::{Draw, Plan, RowParams};

const VOCAB: usize = 37;
const CLASSES: usize = 5;
const ROWS: usize = 64;

fn problem() -> Problem {
    Problem::of_logits(&LogitShape::Gaussian.logits(VOCAB, 300), ROWS)
}

/// Returns the distribution of `token mod 5`.
fn class_law(law: &[f64]) -> Vec<f64> {
    (0..CLASSES).map(|c| law.iter().skip(c).step_by(CLASSES).sum()).collect()
}

/// Draws one row per (seed, position), each with the draws `first .. first + draws`.
fn draw(trial: &Trial<'_>, keys: &[(u64, u64)], first: u32, draws: u32) -> Result<Vec<Draw>, Broken> {
    let problem = problem();
    let plan = Plan { max_rows: ROWS, max_draws: draws, ..Plan::default() };
    let mut sampler = trial.sampler(problem.head(), plan)?;
    let row = |&(seed, position)| RowParams { seed, position, first_draw: first, draws, ..RowParams::default() };
    drawn(&mut *sampler, &problem, keys.chunks(ROWS).map(|keys| keys.iter().map(row).collect()))
}

/// Tests independence: of tokens by a contingency table, of scores by correlation.
fn compare(trial: &Trial<'_>, report: &mut LawReport, what: &str, a: &[Draw], b: &[Draw]) {
    let problem = problem();
    let logits = problem.raw_logits(0);
    let classes = class_law(&softmax(&logits));
    let class = |d: &Draw| d.token as usize % CLASSES;
    let pairs: Vec<(usize, usize)> = a.iter().zip(b).map(|(a, b)| (class(a), class(b))).collect();
    let outcome = contingency(&pairs, &classes, &classes);
    report.p_value(format!("{what}: tokens, contingency table"), pairs.len(), outcome);
    let head = problem.head();
    if let Some(scheme) = trial.factory.reference_variant(&head) {
        let groups = groups_of(&scheme, &head);
        let uniform = |d: &Draw| {
            let group = groups.iter().find(|g| g.contains(&d.token)).cloned().unwrap_or(head.tokens());
            let mass = log_mass(&logits[group.start as usize..group.end as usize]);
            gumbel_cdf(f64::from(d.score) - mass)
        };
        let pairs: Vec<(f64, f64)> = a.iter().zip(b).map(|(a, b)| (uniform(a), uniform(b))).collect();
        report.p_value(format!("{what}: scores, correlation"), pairs.len(), correlation(&pairs));
    }
}

pub(super) fn draws_are_independent(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let keys: Vec<(u64, u64)> = (0..trial.draws(ROWS) as u64).map(|r| (400, r)).collect();
    for (what, first) in [("draws n and n + 1", 0), ("draws 2^31 + n and 2^31 + n + 1", 1 << 31)] {
        let all = draw(trial, &keys, first, 400)?;
        let even: Vec<Draw> = all.iter().step_by(2).copied().collect();
        let odd: Vec<Draw> = all.iter().skip(1).step_by(2).copied().collect();
        compare(trial, report, what, &even, &odd);
    }
    let a = draw(trial, &keys, 0, 200)?;
    let b = draw(trial, &keys, 1 << 16, 200)?;
    compare(trial, report, "draws n and n + 2^16", &a, &b);
    Ok(())
}

fn shifted(trial: &Trial<'_>, report: &mut LawReport, seeds: bool) -> Result<(), Broken> {
    let count = trial.draws(ROWS) as u64;
    for shift in [1u64, 1 << 8, 1 << 24, 1 << 32, 1 << 48] {
        let name = if seeds { "seeds" } else { "positions" };
        let key = |i: u64, by: u64| if seeds { (2 * i + by, 9) } else { (9, 2 * i + by) };
        let base: Vec<(u64, u64)> = (0..count).map(|i| key(i, 0)).collect();
        let moved: Vec<(u64, u64)> = (0..count).map(|i| key(i, shift)).collect();
        let (a, b) = (draw(trial, &base, 0, 200)?, draw(trial, &moved, 0, 200)?);
        compare(trial, report, &format!("{name} n and n + {shift}"), &a, &b);
    }
    // Seed and position must not be interchangeable.
    let (a, b) = (
        (0..count).map(|i| (i, count + i)).collect::<Vec<_>>(),
        (0..count).map(|i| (count + i, i)).collect::<Vec<_>>(),
    );
    let (a, b) = (draw(trial, &a, 0, 200)?, draw(trial, &b, 0, 200)?);
    compare(trial, report, "seed and position exchanged", &a, &b);
    Ok(())
}

pub(super) fn positions_are_independent(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    shifted(trial, report, false)
}

pub(super) fn rows_are_independent(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    shifted(trial, report, true)
}

/// Gives shards the same logits, seed and position, so their noise differs only by the global token ids.
pub(super) fn shards_are_independent(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    if !trial.factory.takes_shards() {
        report.note("this sampler covers whole vocabularies only");
        return Ok(());
    }
    let local = LogitShape::Gaussian.logits(VOCAB, 301);
    let copies = 4;
    let all: Vec<f32> = local.iter().copied().cycle().take(copies * VOCAB).collect();
    let problem = Problem::of_logits(&all, 32);
    let law = class_law(&softmax(&problem.raw_logits(0)[..VOCAB]));
    let starts: Vec<u32> = (0..copies).map(|k| (k * VOCAB) as u32).collect();
    let n = trial.draws(12_800);
    let mut shards = Vec::new();
    for head in problem.head().split(&starts) {
        let start = head.tokens().start;
        let mut sampler = trial.sampler(head, Plan { max_rows: 32, max_draws: 400, ..Plan::default() })?;
        let row = |position| RowParams { seed: 500, position, draws: 400, ..RowParams::default() };
        let calls = (0..n.div_ceil(32 * 400) as u64).map(|call| (32 * call..32 * (call + 1)).map(row).collect());
        let draws = drawn(&mut *sampler, &problem, calls)?;
        let classes: Vec<_> = draws.iter().map(|d| (d.token - start) as usize % CLASSES).collect();
        shards.push(classes);
    }
    for a in 0..copies {
        for b in a + 1..copies {
            let pairs: Vec<(usize, usize)> = shards[a].iter().copied().zip(shards[b].iter().copied()).collect();
            let what = format!("local winners of shards {a} and {b}, contingency table");
            report.p_value(what, pairs.len(), contingency(&pairs, &law, &law));
        }
    }
    Ok(())
}
