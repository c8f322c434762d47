//! The law of rare tokens, through the sampler. [`noise_map`](crate::noise_map) tests the tail of the noise further.

use crate::logits::softmax;
use crate::problem::Problem;
use crate::report::{Broken, LawReport};
use crate::statistics::binomial;
use crate::trial::Trial;

pub(super) fn rare_tokens_are_drawn_as_often_as_they_should(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    let pace = trial.factory.pace();
    for (i, (p, vocab, draws)) in [(1e-6, 65_537usize, 400 * pace), (1e-7, 262_145, 100 * pace)].into_iter().enumerate()
    {
        let gap = -f64::ln(p);
        // One heavy token in the middle; all others have probability p.
        let logits: Vec<f32> = (0..vocab).map(|i| if i == vocab / 2 { gap as f32 } else { 0.0 }).collect();
        let problem = Problem::of_logits(&logits, 8);
        let law = softmax(&problem.raw_logits(0));
        let part = Trial { progress: &|p| (trial.progress)((i as f64 + p) / 2.0), ..*trial };
        // 300 draws of the first case have about 20 rare tokens. Fewer would not reject a map without rare tokens.
        let draws = trial.draws(draws).max(draws.min(300));
        let drawn = part.collect(&problem, draws, 0x7a11 + i as u64)?;
        let hits = drawn.iter().filter(|d| d.token as usize != vocab / 2).count();
        let outcome = binomial(hits as u64, drawn.len() as u64, 1.0 - law[vocab / 2]);
        report.p_value(format!("{vocab} tokens of {p:e} pooled, binomial"), drawn.len(), outcome);
    }
    Ok(())
}
