//! The law of split granules: a shard, a mask or the end of the vocabulary may split a granule.

use crate::data::hash;
use crate::logits::{LogitShape, softmax};
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::statistics::Bins;
use crate::trial::{RowBits, Trial, drawn, rows_of_call};
use flash_sampling_core::backend::is_allowed;
use flash_sampling_core::noise::granule::{self, TOKENS};
use flash_sampling_core::{DType, Domain, Head, Noise, PerturbedArgmax, Plan, RowParams, Samples};

/// Five whole granules and three more tokens.
const VOCAB: u32 = 83;
const ROWS: usize = 32;

fn mask_of(keeps: impl Fn(u32) -> bool) -> Vec<u32> {
    (0..VOCAB.div_ceil(32)).map(|w| (0..32).fold(0, |bits, i| bits | u32::from(keeps(32 * w + i)) << i)).collect()
}

/// Returns masks that allow some tokens of a granule; the last two depend on the leaders of draw 0.
fn masks(noise: &Noise) -> [Vec<u32>; 6] {
    let leads = |token| noise.word(Domain::Granule, 0, granule::of(token)) % TOKENS == token % TOKENS;
    [
        mask_of(|_| true),
        mask_of(|token| token % TOKENS == 7),
        mask_of(|token| token % TOKENS != 0 && granule::of(token) != 2),
        mask_of(|token| hash(801, token.into()).is_multiple_of(2)),
        mask_of(leads),
        mask_of(|token| !leads(token)),
    ]
}

/// Returns the heads under test: the whole vocabulary and, if the sampler takes shards, shards that split granules.
fn heads<'p>(trial: &Trial<'_>, problem: &'p Problem) -> Vec<Head<'p>> {
    let whole = problem.head();
    let shards = if trial.factory.takes_shards() { whole.split(&[0, 5, 9, 15, 17, 31, 82]) } else { Vec::new() };
    shards.into_iter().chain([whole]).collect()
}

pub(super) fn granules_may_be_cut(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let plan = Plan { max_rows: ROWS, max_draws: 128, ..Plan::default() };
    let (mut found, mut want) = (Samples::new(), Samples::new());
    let integers = Problem::integers(Size::new(ROWS, VOCAB as usize, 16), DType::BF16, DType::BF16, 800);
    let noise = Noise::new(802, 5).ok_or(Broken("the position is valid".into()))?;
    let masks = masks(&noise);
    let row = RowParams { seed: 802, position: 5, draws: 24, ..RowParams::default() };
    let rows: Vec<RowParams<'_>> =
        masks.iter().cycle().take(ROWS).map(|mask| RowParams { mask: Some(mask), ..row }).collect();
    let mut compared = 0;
    for head in heads(trial, &integers) {
        let Some(mut reference) = trial.reference(head, plan) else { continue };
        trial.sampler(head, plan)?.sample(integers.input(), &rows, &mut found)?;
        reference.sample(integers.input(), &rows, &mut want)?;
        RowBits::same(&found, &want, format!("tokens {:?}, {} masks in turn", head.tokens(), masks.len()))?;
        compared += ROWS;
    }
    report.agreed("rows of cut granules", compared);

    // The law of the draw, for heads of at least five tokens.
    let problem = Problem::of_logits(&LogitShape::Gaussian.logits(VOCAB as usize, 803), ROWS);
    let logits = problem.raw_logits(0);
    for head in heads(trial, &problem).into_iter().filter(|head| head.tokens().len() > 4) {
        let (tokens, mask) = (head.tokens(), &masks[3]);
        let kept = |token| {
            if tokens.contains(&token) && is_allowed(mask, token) { logits[token as usize] } else { f32::NEG_INFINITY }
        };
        let law = softmax(&(0..VOCAB).map(kept).collect::<Vec<_>>());
        let mut sampler = trial.sampler(head, plan)?;
        let row = RowParams { seed: 804, draws: 128, mask: Some(mask), ..RowParams::default() };
        let calls = (0..trial.draws(2) as u64).map(|call| rows_of_call(row, call, ROWS));
        let drawn: Vec<_> = drawn(&mut *sampler, &problem, calls)?.iter().map(|d| d.token as usize).collect();
        ensure!(drawn.iter().all(|&token| law[token] > 0.0), "tokens {tokens:?}: drew a masked token");
        let outcome = Bins::of(&law, &drawn, law.len(), |i| i).chi_square();
        let outcome = outcome.ok_or(Broken(format!("tokens {tokens:?}: one bin is left")))?;
        let what = format!("masked draws of tokens {tokens:?}, chi-square");
        report.p_value(what, drawn.len(), outcome);
    }
    Ok(())
}
