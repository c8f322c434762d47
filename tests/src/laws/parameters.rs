//! The law of random parameters: random combinations of the knobs that other laws test one by one.

use crate::data::u01_open;
use crate::laws::knobs::refused_by_name;
use crate::logits::LogitShape;
use crate::problem::{Problem, Size};
use crate::report::{Broken, LawReport, ensure};
use crate::trial::{RowBits, Trial};
use flash_sampling_core::{
    DType, History, Knob, Knobs, LogprobsMode, Order, PerturbedArgmax, Plan, RowParams, Samples,
};

const SIZE: Size = Size::new(4, 1003, 40);
const LOGPROBS_AND_KEPT: Knobs = Knobs::LOGPROBS.with(Knob::Kept);
const CALLS: usize = 60;
const PLAN: Plan = Plan { max_rows: SIZE.rows, max_draws: 12, max_logprobs: Some(5), canonical: false };

/// The sequence and masks of the rows. The masks allow a third of the tokens, three, one, and none.
struct Lists {
    history: History,
    masks: [Vec<u32>; 4],
}

impl Lists {
    fn new() -> Self {
        let mut history = History::new(&[3, 9, 9, 1002, 37, 64]);
        history.extend((0..200).map(|i| i * i % 211));
        let mut masks = [vec![0x9249_2492; SIZE.vocab.div_ceil(32)], vec![0; 30], vec![0; 3], vec![]];
        (masks[1][0], masks[1][29], masks[2][2]) = (1 << 2, 1 << 31 | 1, 1 << 13);
        Lists { history, masks }
    }
}

/// A sequence of uniforms.
struct Dice {
    seed: u64,
    thrown: u64,
}

impl Dice {
    fn uniform(&mut self) -> f64 {
        self.thrown += 1;
        u01_open(self.seed, self.thrown)
    }

    /// Returns a value in `low .. high` whose logarithm is uniform.
    fn magnitude(&mut self, low: f64, high: f64) -> f32 {
        (low * (high / low).powf(self.uniform())) as f32
    }

    fn is_one_in(&mut self, n: u32) -> bool {
        self.uniform() * f64::from(n) < 1.0
    }

    /// Returns a row with some of the knobs in `can`. Half of the rows use only top-k, top-p and min-p, like most
    /// requests.
    fn row<'a>(&mut self, can: Knobs, without_replacement: bool, lists: &'a Lists) -> RowParams<'a> {
        let history = Some(&lists.history);
        let mut row = RowParams { seed: self.seed, position: self.thrown, history, ..RowParams::default() };
        row.order = [Order::Vllm, Order::HuggingFace, Order::LlamaCpp][(self.uniform() * 3.0) as usize];
        row.draws = 12;
        let is_usual = self.is_one_in(2);
        if !is_usual {
            row.temperature = if self.is_one_in(8) { 0.0 } else { self.magnitude(0.1, 10.0) };
            row.draws = 1 + (self.uniform() * 12.0) as u32;
            row.first_draw = [0, 0, 5, u32::MAX - 12][(self.uniform() * 4.0) as usize];
            row.without_replacement = without_replacement && row.temperature > 0.0 && self.is_one_in(6);
            row.logprobs = self.is_one_in(2).then(|| (self.uniform() * 6.0) as u32);
            row.kept = can.contains(Knob::Kept) && row.temperature > 0.0 && self.is_one_in(3);
            row.mask = lists.masks.get((self.uniform() * 12.0) as usize).map(Vec::as_slice);
            if self.is_one_in(4) {
                row.logit_bias = &[(2, 1.5), (64, -0.25), (77, f32::NEG_INFINITY), (500, 3.0), (1002, -2.0)];
            }
        }
        for knob in can.iter() {
            let one_in = match knob {
                // Set below, for half of the rows with log-probabilities.
                Knob::LogprobTokenIds | Knob::Ranks => continue,
                Knob::TopK | Knob::TopP | Knob::MinP => 2,
                _ if is_usual => continue,
                _ => 4,
            };
            if !self.is_one_in(one_in) {
                continue;
            }
            match knob {
                Knob::TopK => row.top_k = self.magnitude(1.0, 2.0 * SIZE.vocab as f64) as u32,
                Knob::TopP if self.is_one_in(2) => row.top_p = self.uniform() as f32,
                Knob::TopP => row.top_p = 1.0 - self.magnitude(1e-6, 0.9),
                Knob::MinP => row.min_p = self.magnitude(1e-9, 1.0),
                Knob::TopNSigma => row.top_n_sigma = self.magnitude(0.1, 5.0),
                Knob::EpsilonCutoff => row.epsilon_cutoff = self.magnitude(1e-7, 0.5),
                Knob::TypicalP => row.typical_p = self.uniform() as f32,
                Knob::XtcThreshold => {
                    (row.xtc_threshold, row.xtc_probability) = (self.magnitude(1e-4, 0.5), self.uniform() as f32)
                }
                Knob::Banned => row.banned = &[0, 7, 1002, 500, 64, 65, 66],
                Knob::MinTokens => (row.min_tokens, row.stop_token_ids) = (1000, &[5, 2, 128]),
                Knob::RepetitionPenalty => row.repetition_penalty = self.magnitude(0.5, 2.0),
                Knob::FrequencyPenalty => row.frequency_penalty = (self.uniform() * 4.0 - 2.0) as f32,
                Knob::PresencePenalty => row.presence_penalty = (self.uniform() * 4.0 - 2.0) as f32,
                Knob::LogprobsMode => row.logprobs_mode = LogprobsMode::Raw,
                Knob::DryMultiplier => (row.dry_multiplier, row.dry_allowed_length) = (self.magnitude(0.1, 2.0), 1),
                _ => {}
            }
        }
        if row.logprobs.is_some() && self.thrown.is_multiple_of(2) {
            row.ranks = can.contains(Knob::Ranks);
            row.logprob_token_ids = if can.contains(Knob::LogprobTokenIds) { &[500, 2, 77, 1002, 2] } else { &[] };
        }
        row
    }
}

pub(super) fn any_parameters_have_the_reference_bits(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let can = refused_by_name(trial, report, Knobs::ADJUSTMENTS.union(Knobs::FILTERS).union(LOGPROBS_AND_KEPT), PLAN)?;
    let without_replacement = trial.capabilities()?.without_replacement;
    // One token above thousands of rare tokens with a large total mass, so that a filter removes tokens that could win.
    let far = |i: usize| if i == 77 { 0.0 } else { -8.0 - 3.0 * u01_open(943, i as u64) as f32 };
    let far: Vec<f32> = (0..16411).map(far).collect();
    // Thousands of logits right below the cap. A temperature after the filters rounds some of the largest to one value.
    let near: Vec<f32> = (0..16_411).map(|i| 1.25 + u01_open(944, i) as f32).collect();
    let mut narrow = Problem::of_logits(&near, SIZE.rows);
    narrow.soft_cap = Some(0.5);
    // Top-n-sigma is left out: the deviation of such logits is only as exact as the steps of its grid.
    let within_steps = can.without(Knobs::of(&[Knob::TopNSigma]));
    let problems = [
        ("integers", can, Problem::integers(SIZE, DType::BF16, DType::BF16, 940)),
        ("a far tail", can, Problem::of_logits(&far, SIZE.rows)),
        ("tail-heavy", can, Problem::of_logits(&LogitShape::TailHeavy.logits(SIZE.vocab, 941), SIZE.rows)),
        ("narrow", within_steps, narrow),
    ];
    let lists = Lists::new();
    for (seed, (name, can, problem)) in problems.iter().enumerate() {
        let Some(mut reference) = trial.reference(problem.head(), PLAN) else { return Ok(()) };
        let mut sampler = trial.sampler(problem.head(), PLAN)?;
        let mut dice = Dice { seed: 942 + seed as u64, thrown: 0 };
        let (mut out, mut want) = (Samples::new(), Samples::new());
        // A quarter of the calls would miss two negative controls.
        let calls = trial.draws(CALLS).max(CALLS / 2);
        for _ in 0..calls {
            let rows = [(); SIZE.rows].map(|()| dice.row(*can, without_replacement, &lists));
            sampler.sample(problem.input(), &rows, &mut out)?;
            reference.sample(problem.input(), &rows, &mut want)?;
            for (r, row) in rows.iter().enumerate() {
                let kept = |out: &Samples| out.row(r).ok()?.kept.map(|kept| (kept.count, kept.tokens.to_vec()));
                let (found, want) = ((RowBits::of(&out, r), kept(&out)), (RowBits::of(&want, r), kept(&want)));
                ensure!(found == want, "{name}, {row:?}: {found:?}, the reference has {want:?}");
            }
        }
        report.agreed(format!("{name}: rows of any parameters"), calls * SIZE.rows);
    }
    Ok(())
}
