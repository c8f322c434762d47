//! The law of speculative decoding by shared noise.

use crate::data::hash;
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::Trial;
use flash_sampling_core::speculation::verify;
use flash_sampling_core::{DType, History, PerturbedArgmax, Plan, RowParams, Samples};

const BLOCK: usize = 4;
const STEPS: usize = 60;
const CONTEXTS: usize = 64;

/// A model that selects its hidden state from a table by a hash of all earlier tokens.
struct Model<'a> {
    problem: &'a Problem,
}

impl Model<'_> {
    /// Returns the row of the table for a sequence.
    fn context(tokens: &[u32]) -> usize {
        let mixed = tokens.iter().fold(1, |h, &t| hash(h, u64::from(t)));
        mixed as usize % CONTEXTS
    }

    /// Draws the token after `history`.
    fn draw(
        &self,
        sampler: &mut dyn PerturbedArgmax,
        row: RowParams<'_>,
        history: &History,
        out: &mut Samples,
    ) -> Result<u32, Broken> {
        let position = history.output().len() as u64;
        let at = Model::context(history.output());
        let row = RowParams { position, history: row.history.map(|_| history), ..row };
        sampler.sample(self.problem.input().row_range(at..at + 1), &[row], out)?;
        Ok(out.row(0)?.token())
    }
}

pub(super) fn verified_blocks_emit_what_the_target_draws(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    let size = Size::new(CONTEXTS, 300, 24);
    let target = Problem::gaussian(size, DType::BF16, DType::F32, 990);
    // The draft's hidden states are the target's mixed with other states.
    let other = Problem::gaussian(size, DType::BF16, DType::F32, 991);
    let mixed = crate::tensor::Tensor::from_fn(DType::F32, CONTEXTS, 24, |r, k| {
        0.9 * target.hidden.row(r)[k] + 0.4 * other.hidden.row(r)[k]
    });
    let draft = Problem { hidden: mixed, ..target.clone() };
    let plan = Plan { max_rows: BLOCK + 1, ..Plan::default() };
    let can = trial.capabilities()?;
    let prompt = History::new(&[3, 5, 5]);
    let base = RowParams { seed: 99, temperature: 0.8, ..RowParams::default() };
    let penalised = RowParams { history: Some(&prompt), frequency_penalty: 0.6, repetition_penalty: 1.2, ..base };
    let mut sampler = trial.sampler(target.head(), plan)?;
    let mut out = Samples::new();
    for (what, row) in [("plain", base), ("penalised", penalised)] {
        if !row.enabled().without(can.knobs).is_empty() {
            continue;
        }
        let mut want = prompt.clone();
        for _ in 0..STEPS + BLOCK {
            let token = Model { problem: &target }.draw(&mut *sampler, row, &want, &mut out)?;
            want.push(token);
        }
        let (mut emitted, mut accepted, mut blocks) = (prompt.clone(), 0, 0);
        while emitted.output().len() < STEPS {
            let mut drafted = emitted.clone();
            for _ in 0..BLOCK {
                let token = Model { problem: &draft }.draw(&mut *sampler, row, &drafted, &mut out)?;
                drafted.push(token);
            }
            let done = emitted.output().len();
            let contexts: Vec<usize> = (done..=done + BLOCK).map(|n| Model::context(&drafted.output()[..n])).collect();
            let states = target.hidden.select(&contexts);
            let row = RowParams { position: done as u64, history: row.history.map(|_| &emitted), ..row };
            let verdict = verify(&mut *sampler, states.matrix(), row, &drafted.output()[done..], &mut out)
                .map_err(|error| Broken(error.to_string()))?;
            let kept = drafted.output()[done..done + verdict.accepted].to_vec();
            emitted.extend(kept.into_iter().chain([verdict.next]));
            (accepted, blocks) = (accepted + verdict.accepted, blocks + 1);
        }
        let n = emitted.output().len();
        ensure!(emitted.output() == &want.output()[..n], "{what}: {:?}, drawn one by one {want:?}", emitted.output());
        let some = 0 < accepted && accepted < blocks * BLOCK;
        ensure!(some, "{what}: {accepted} of {} draft tokens accepted: nothing is tested", blocks * BLOCK);
        report.agreed(format!("{what} tokens emitted, {accepted} of {} accepted", blocks * BLOCK), n);
    }
    Ok(())
}
