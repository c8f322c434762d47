//! The variants on the CPU, and draws from a row of existing logits, on one thread.

use crate::args::CpuBench;
use crate::record::Record;
use flash_sampling::cpu::Standalone;
use flash_sampling::{Backend, CpuOptions, DType, Matrix, Plan, RowParams};
use flash_sampling_cli::args::VARIANTS;
use flash_sampling_cli::bench::cases::{Inputs, Ours, argmax, draw};
use flash_sampling_cli::bench::record::Section;
use flash_sampling_cli::bench::table::{GREEDY, READ};
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::bench::{add, end, read, table, time, variants};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::Logits;
use flash_sampling_cli::interrupt::Interrupt;
use std::io::Write;

/// Rounds of the standalone sampler per round of the matmul, which takes a thousand times as long.
pub const STANDALONE_ROUNDS: usize = 20;

/// Times the variants and the draws from logits for every head.
///
/// # Errors
/// Errors of the backend, Ctrl-C.
pub fn run(
    args: &CpuBench,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let all = VARIANTS.iter().filter_map(|variant| variant.parse().ok()).collect();
    let ours = Ours { backend: Backend::Cpu(args.cpu.options()), variants: all, isas: Vec::new(), shadow: args.shadow };
    for size in args.sizes() {
        variants(&ours, &size, args.sizes.dtype, record, out, interrupt)?;
        let logits = Rows::new(size.vocab)?;
        let section = time(logits.section(size.rounds), logits.contenders(&args.cpu.options())?, interrupt)?;
        add(record, section, out, table::section)?;
    }
    end(record, None, out)
}

/// Peaked logits `[1, vocab]`, for the standalone sampler.
struct Rows {
    logits: Vec<f32>,
}

impl Rows {
    /// The logits of a small synthetic head.
    fn new(vocab: usize) -> Result<Self, CommandError> {
        const HIDDEN: usize = 64;
        let inputs = Inputs::new(vocab, HIDDEN, 1, DType::F32)?;
        let (weight, states) = (inputs.weight()?, inputs.states(Logits::Peaked, 1)?);
        let (mut w, mut h) = ([0f32; HIDDEN], [0f32; HIDDEN]);
        states.row_to_f32(0, &mut h);
        let dot = |token| {
            weight.row_to_f32(token, &mut w);
            w.iter().zip(&h).map(|(w, h)| w * h).sum()
        };
        Ok(Rows { logits: (0..vocab).map(dot).collect() })
    }

    /// Contenders on one thread: the read, the argmax, the draw, and draws with filters, with a temperature, and with
    /// many draws per row.
    fn contenders(&self, options: &CpuOptions) -> Result<Vec<Contender<'_>>, CommandError> {
        let options = CpuOptions { threads: Some(1), ..*options };
        let input = Matrix::new(&self.logits, 1, self.logits.len())?;
        let bytes = input.bytes();
        let plain = RowParams::default;
        let mut contenders = vec![Contender::new(READ, move || {
            std::hint::black_box(read::fold(bytes));
            Ok(())
        })];
        for (name, of_row) in [
            (GREEDY, argmax()),
            ("standalone, peaked", plain()),
            ("temperature 0.8", RowParams { temperature: 0.8, ..plain() }),
            ("min-p 0.05", RowParams { min_p: 0.05, ..plain() }),
            ("top-k 20", RowParams { top_k: 20, ..plain() }),
            ("top-p 0.95", RowParams { top_p: 0.95, ..plain() }),
            ("1000 draws", RowParams { draws: 1000, ..plain() }),
        ] {
            let plan = Plan { max_draws: of_row.draws, ..Plan::default() };
            let sampler =
                Standalone::new(self.logits.len(), plan, &options).map_err(flash_sampling::BuildError::from)?;
            contenders.push(Contender::new(name, draw(Box::new(sampler), input, of_row)));
        }
        Ok(contenders)
    }

    /// The section for these contenders, without entries.
    fn section(&self, rounds: usize) -> Section {
        Section::of_logits("draw from logits", self.logits.len(), rounds * STANDALONE_ROUNDS)
    }
}
