//! The law of the maximum of a group's scores.

use crate::logits::LogitShape;
use crate::problem::Problem;
use crate::report::{Broken, LawReport, Point, Series, SeriesKind};
use crate::statistics::{gumbel_cdf, gumbel_quantile, kolmogorov_smirnov};
use crate::trial::{Trial, groups_of};
use flash_sampling_core::reference::log_mass;

/// Checks that `max (l_i + g_i)` over a group is Gumbel with location `L = ln sum e^(l_i)`.
///
/// Source: Gumbel (1954), paper Lemma D.2. For pathwise samplers the group is the whole vocabulary. For samplers exact
/// in distribution it is the group of the drawn token, because the choice of the group and the score use different
/// noise.
pub(super) fn winning_scores_are_gumbel(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    for (i, shape) in LogitShape::ALL.into_iter().enumerate() {
        let problem = Problem::of_logits(&shape.logits(1031, 200 + i as u64), 32);
        let logits = problem.raw_logits(0);
        let head = problem.head();
        let Some(scheme) = trial.factory.reference_variant(&head) else {
            report.note("this factorisation has no reference to name its groups");
            return Ok(());
        };
        let groups = groups_of(&scheme, &head);
        let mass: Vec<f64> = groups.iter().map(|g| log_mass(&logits[g.start as usize..g.end as usize])).collect();
        let draws = trial.collect(&problem, trial.draws(6000), 0x6e1 + i as u64)?;
        let centred = draws.iter().map(|d| {
            let group = groups.iter().position(|g| g.contains(&d.token)).unwrap_or(0);
            f64::from(d.score) - mass[group]
        });
        let mut scores: Vec<f64> = centred.collect();
        scores.sort_by(f64::total_cmp);
        let n = scores.len();
        let level = |k: usize| (k as f64 + 0.5) / n as f64;
        report.series.push(Series {
            name: format!("{shape:?}, 1031 tokens"),
            kind: SeriesKind::GumbelQuantiles,
            points: (0..n)
                .step_by((n / 200).max(1))
                .map(|k| Point { x: level(k), expected: gumbel_quantile(level(k)), observed: scores[k] })
                .collect(),
        });
        let mut uniform: Vec<f64> = scores.into_iter().map(gumbel_cdf).collect();
        let outcome = kolmogorov_smirnov(&mut uniform);
        report.p_value(format!("{shape:?}: winning scores, Kolmogorov-Smirnov"), n, outcome);
        (trial.progress)((i + 1) as f64 / 5.0);
    }
    Ok(())
}
