//! The same table with candle as a rival: `cargo bench -p flash-sampling-cli --features candle --bench candle`.
//!
//! candle (0.11) has no bf16 matmul on the CPU, so its weight is float32. Three ways of that:
//! * `candle`: the weight was converted once, beforehand, which takes twice the memory of the bf16 weight besides it;
//!   then matmul, and its `LogitsProcessor` on each row.
//! * `candle, bf16 kept`: the weight stays bf16 and is converted in each call.
//! * `candle, matmul alone`: the first without a draw.
//!
//! The last column says how many times as fast as `candle` a line is. candle takes rayon's threads, so ours do too:
//! `RAYON_NUM_THREADS` sets both.

use candle_core::{DType as CandleType, Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use clap::Parser;
use flash_sampling::Matrix;
use flash_sampling_cli::args::{BenchArgs, Timed, Type};
use flash_sampling_cli::bench::cases::{Inputs, Ours, Rows};
use flash_sampling_cli::bench::record::Record;
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::bench::{STANDALONE_ROUNDS, save, table, time};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use flash_sampling_cli::synthetic::Logits;
use std::hint::black_box;
use std::io::Write;
use std::process::ExitCode;

/// The contender that the last column compares with.
const RIVAL: &str = "candle";

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    bench: BenchArgs,
    /// Given by cargo.
    #[arg(long = "bench", hide = true)]
    _bench: bool,
}

fn failed(error: candle_core::Error) -> CommandError {
    CommandError::usage(format!("candle: {error}"))
}

/// A copy as a candle tensor of the same type.
fn tensor(matrix: Matrix<'_>, dtype: Type) -> Result<Tensor, CommandError> {
    let dtype = match dtype {
        Type::Bf16 => CandleType::BF16,
        Type::F16 => CandleType::F16,
        Type::F32 => CandleType::F32,
    };
    Tensor::from_raw_buffer(matrix.bytes(), dtype, &[matrix.rows(), matrix.cols()], &Device::Cpu).map_err(failed)
}

fn processor() -> LogitsProcessor {
    LogitsProcessor::from_sampling(1, Sampling::All { temperature: 1.0 })
}

fn candle_contenders(weight: &Tensor, hidden: Tensor) -> Result<Vec<Contender<'_>>, CommandError> {
    let rows = hidden.dim(0).map_err(failed)?;
    let states = move || hidden.to_dtype(CandleType::F32);
    let wide = weight.to_dtype(CandleType::F32).map_err(failed)?;
    let draw = move |processor: &mut LogitsProcessor, logits: Tensor| {
        (0..rows).try_for_each(|row| processor.sample(&logits.get(row)?).map(|token| _ = black_box(token)))
    };
    let (mut first, mut second) = (processor(), processor());
    let (states_kept, states_alone, wide_alone) = (states.clone(), states.clone(), wide.clone());
    Ok(vec![
        Contender::new(RIVAL, move || {
            let logits = states().and_then(|states| states.matmul(&wide.t()?));
            logits.and_then(|logits| draw(&mut first, logits)).map_err(failed)
        }),
        Contender::new("candle, bf16 kept", move || {
            let wide = weight.to_dtype(CandleType::F32).and_then(|wide| wide.t());
            let logits = wide.and_then(|wide| states_kept()?.matmul(&wide));
            logits.and_then(|logits| draw(&mut second, logits)).map_err(failed)
        }),
        Contender::new("candle, matmul alone", move || {
            let logits = states_alone().and_then(|states| states.matmul(&wide_alone.t()?));
            logits.map(|logits| drop(black_box(logits))).map_err(failed)
        }),
    ])
}

fn run(args: &BenchArgs, interrupt: &Interrupt) -> Result<(), CommandError> {
    if args.threads.is_some() {
        return Err(CommandError::usage("candle takes rayon's threads: set RAYON_NUM_THREADS, not --threads"));
    }
    let size = args.size();
    let args = BenchArgs { variants: vec![Timed::Tiled], ..args.clone() };
    let ours = Ours { options: args.options(), variants: args.variants() };
    let most = size.rows.iter().copied().max().unwrap_or(1);
    let inputs = Inputs::new(size.vocab, size.hidden, most, args.dtype.into())?;
    let weight = tensor(inputs.weight()?, args.dtype)?;
    let mut sections = Vec::new();
    for &rows in &size.rows {
        let hidden = tensor(inputs.states(Logits::Peaked, rows)?, args.dtype)?;
        let mut contenders = inputs.contenders(&ours, rows)?;
        contenders.extend(candle_contenders(&weight, hidden)?);
        sections.push(time(inputs.section(&ours, rows, size.rounds), contenders, interrupt)?);
    }
    let rows = Rows::new(size.vocab)?;
    let logits = Tensor::from_slice(rows.logits(Logits::Peaked), size.vocab, &Device::Cpu).map_err(failed)?;
    let mut contenders = rows.contenders(&ours)?;
    let mut processor = processor();
    contenders.push(Contender::new(RIVAL, move || {
        processor.sample(&logits).map(|token| _ = black_box(token)).map_err(failed)
    }));
    sections.push(time(rows.section(size.rounds * STANDALONE_ROUNDS), contenders, interrupt)?);
    let record = Record::now(sections, Vec::new());
    let out = &mut std::io::stdout().lock();
    table::write(out, &record, Some(RIVAL)).and_then(|()| out.flush()).map_err(CommandError::write("the table"))?;
    save(&record, &args)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.bench, &Interrupt::listen()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", error.one_line());
            ExitCode::from(error.exit_code())
        }
    }
}
