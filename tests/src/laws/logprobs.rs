//! Log-probabilities.

use crate::logits::LogitShape;
use crate::problem::Problem;
use crate::report::{Broken, LawReport, ensure};
use crate::trial::Trial;
use flash_sampling_core::reference::log_mass;
use flash_sampling_core::{MassHistogram, Plan, RowParams};

pub(super) fn log_z_and_top_logprobs_are_right(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let plan = Plan { max_rows: 5, max_draws: 3, max_logprobs: Some(2000), canonical: false };
    let asked = [Some(0), Some(1), Some(20), Some(2000), None];
    let mut worst = 0.0f64;
    for (i, shape) in LogitShape::ALL.into_iter().enumerate() {
        for vocab in [1, 77, 1500] {
            for temperature in [1.0f32, 0.0, 0.7] {
                let problem = Problem::of_logits(&shape.logits(vocab, 800 + i as u64), 5);
                let inverse = if temperature == 0.0 { 1.0 } else { 1.0 / temperature };
                let logits: Vec<f32> = problem.raw_logits(0).iter().map(|l| l * inverse).collect();
                let mut order: Vec<u32> = (0..vocab as u32).collect();
                order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
                let mut mass = MassHistogram::default();
                mass.extend_from_slice(&logits);
                let rows: Vec<RowParams<'_>> = asked
                    .iter()
                    .map(|&logprobs| RowParams { seed: 80, temperature, draws: 3, logprobs, ..RowParams::default() })
                    .collect();
                let out = trial.sample(&problem, plan, &rows)?;
                let where_ = || format!("{shape:?}, {vocab} tokens, temperature {temperature}");
                for (row, asked) in out.iter().zip(asked) {
                    let row = row?;
                    let Some(asked) = asked else {
                        let nothing = row.log_z.is_none() && row.top.is_empty() && row.mass.is_none();
                        ensure!(nothing, "{}: log-probabilities that nobody asked for", where_());
                        continue;
                    };
                    let log_z = row.log_z.ok_or_else(|| Broken(format!("{}: no log Z", where_())))?;
                    worst = worst.max((log_z - log_mass(&logits)).abs());
                    ensure!(
                        log_z.to_bits() == mass.log_z().to_bits(),
                        "{}: log Z is {log_z}, the mass histogram's is {}",
                        where_(),
                        mass.log_z()
                    );
                    ensure!(row.mass == Some(&mass), "{}: the masses differ", where_());
                    let want = &order[..(asked as usize).min(vocab)];
                    let top: Vec<u32> = row.top.iter().map(|c| c.winner.token).collect();
                    ensure!(top == want, "{}: the top {asked} are {top:?}, not {want:?}", where_());
                    for c in row.top {
                        ensure!(c.logit == logits[c.winner.token as usize], "{}: a top logit is off", where_());
                    }
                    for d in row.draws {
                        let exact = f64::from(logits[d.token as usize]) - log_mass(&logits);
                        let found = row.log_prob(d.logit).unwrap_or(f64::NAN);
                        worst = worst.max((found - exact).abs());
                    }
                }
            }
        }
        (trial.progress)((i + 1) as f64 / 5.0);
    }
    report.agreed("top lists and log Z bits", 5 * 3 * 3 * 4);
    report.at_most("largest error of a log-probability, in nats", 5 * 3 * 3 * 4, worst, 2e-8);
    Ok(())
}
