//! candle on the CPU, on the same inputs.
//!
//! candle (0.11) has no bf16 matmul on the CPU, so its weight is float32. There are three contenders:
//! * `candle`: a float32 weight that was converted before, at twice the memory of the bf16 weight and in addition to
//!   it; a matmul, then candle's `LogitsProcessor` on each row.
//! * `candle, bf16 kept`: the weight stays bf16, and each call converts it.
//! * `candle, matmul alone`: as `candle`, without the draw.
//!
//! With `--filters`: one row of logits on one thread, and whether both programs keep the same tokens.
//!
//! The last column is the time of `candle` divided by the time of the line. Both programs use rayon's threads, so
//! `RAYON_NUM_THREADS` sets both.

use crate::args::CpuBench;
use crate::cpu::Rows;
use crate::filters::cpu::Standalone;
use crate::filters::inputs::Kind;
use crate::filters::table as filter_table;
use crate::record::Record;
use candle_core::{DType as CandleType, Device, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling};
use flash_sampling::{Backend, DType, Matrix, PerturbedArgmax, RowParams, Samples, VariantConfig};
use flash_sampling_cli::bench::cases::{Inputs, Ours};
use flash_sampling_cli::bench::record::Section;
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::bench::{add, show, table, time};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::Logits;
use flash_sampling_cli::interrupt::Interrupt;
use std::hint::black_box;
use std::io::Write;

/// The baseline of the last column.
const RIVAL: &str = "candle";

fn failed(error: candle_core::Error) -> CommandError {
    CommandError::usage(format!("candle: {error}"))
}

/// Copies a matrix to a candle tensor of the same type.
fn tensor(matrix: Matrix<'_>, dtype: DType) -> Result<Tensor, CommandError> {
    let dtype = match dtype {
        DType::BF16 => CandleType::BF16,
        DType::F16 => CandleType::F16,
        DType::F32 => CandleType::F32,
        other => return Err(CommandError::usage(format!("candle: a weight of type {}", other.name()))),
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

/// The filters of both programs: name, ours, candle's, and the wanted speed ratio.
fn filters() -> [(&'static str, RowParams<'static>, Sampling, f64); 2] {
    let plain = RowParams::default();
    [
        ("top-p 0.95", RowParams { top_p: 0.95, ..plain }, Sampling::TopP { p: 0.95, temperature: 1.0 }, 10.0),
        ("top-k 40", RowParams { top_k: 40, ..plain }, Sampling::TopK { k: 40, temperature: 1.0 }, 4.0),
    ]
}

/// The tokens that candle's rule keeps: it sums the sorted float32 probabilities in the precision of `sum`.
fn kept_by_candle(logits: &[f32], params: &RowParams<'_>, sum: fn(f64, f32) -> f64) -> Vec<u32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = logits.iter().map(|l| (l - largest).exp()).collect();
    let total: f32 = exps.iter().map(|&e| f64::from(e)).sum::<f64>() as f32;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&i, &j| logits[j as usize].total_cmp(&logits[i as usize]));
    let mut mass = 0.0;
    let until = |&i: &u32| {
        let before = mass;
        mass = sum(mass, exps[i as usize] / total);
        before < f64::from(params.top_p)
    };
    let count = if params.top_k > 0 { params.top_k as usize } else { order.len() };
    let mut kept: Vec<u32> = order.into_iter().take(count).take_while(until).collect();
    kept.sort_unstable();
    kept
}

/// The number of tokens in only one of two sorted lists.
fn difference_count(a: &[u32], b: &[u32]) -> usize {
    let only = |a: &[u32], b: &[u32]| a.iter().filter(|token| b.binary_search(token).is_err()).count();
    only(a, b) + only(b, a)
}

fn filtered(
    args: &CpuBench,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let size = args.sizes().remove(0);
    let mut lines = Vec::new();
    for kind in Kind::ALL {
        let standalone = Standalone::new(size.vocab, kind, &args.cpu.options());
        let logits = standalone.logits();
        let input = Matrix::new(logits, 1, size.vocab)?;
        let tensor = Tensor::from_slice(logits, size.vocab, &Device::Cpu).map_err(failed)?;
        let mut contenders = Vec::new();
        for (name, params, sampling, _) in filters() {
            let (mut sampler, mut out, mut position) = (standalone.sampler()?, Samples::new(), 0);
            contenders.push(Contender::new(name, move || {
                position += 1;
                Ok(sampler.sample(input, &[RowParams { position, ..params }], &mut out)?)
            }));
            let (mut processor, tensor) = (LogitsProcessor::from_sampling(1, sampling), tensor.clone());
            contenders.push(Contender::new(format!("candle, {name}"), move || {
                processor.sample(&tensor).map(|token| _ = black_box(token)).map_err(failed)
            }));
        }
        let section = time(standalone.section(size.rounds), contenders, interrupt)?;
        for (name, params, _, wanted) in filters() {
            let best = |name: &str| section.entry(name).map_or(f64::NAN, |entry| entry.best);
            let ratio = best(&format!("candle, {name}")) / best(name);
            let (mut sampler, mut out) = (standalone.sampler()?, Samples::new());
            sampler.sample(input, &[RowParams { kept: true, ..params }], &mut out)?;
            let row = out.row(0).map_err(|error| CommandError::usage(error.to_string()))?;
            let bitmap = row.kept.map_or(&[][..], |kept| kept.tokens);
            let kept: Vec<u32> =
                (0..size.vocab as u32).filter(|t| bitmap[(t >> 5) as usize] >> (t & 31) & 1 == 1).collect();
            let exact = kept_by_candle(logits, &params, |sum, p| sum + f64::from(p));
            let single = kept_by_candle(logits, &params, |sum, p| f64::from(sum as f32 + p));
            lines.push(format!(
                "{}, {name}: candle / ours {ratio:.1} ({wanted} wanted); {} tokens kept, candle's rule differs in {}, \
                 and in {} when it adds in float32",
                kind.name(),
                kept.len(),
                difference_count(&kept, &exact),
                difference_count(&kept, &single)
            ));
        }
        add(record, section, out, filter_table::section)?;
    }
    show(out, |out| lines.iter().try_for_each(|line| writeln!(out, "{line}")))
}

/// Times the draw of the first head, and draws from a row of logits.
///
/// # Errors
/// The errors of candle and the backend, Ctrl-C.
pub fn run(
    args: &CpuBench,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    if args.filters {
        return filtered(args, record, out, interrupt);
    }
    let (size, options) = (args.sizes().remove(0), args.cpu.options());
    let variants = vec![VariantConfig::Tiled];
    let ours = Ours { backend: Backend::Cpu(options), variants, isas: Vec::new(), shadow: false };
    let most = size.rows.iter().copied().max().unwrap_or(1);
    let inputs = Inputs::new(size.vocab, size.hidden, most, args.sizes.dtype)?;
    let weight = tensor(inputs.weight()?, args.sizes.dtype)?;
    let against = |out: &mut dyn Write, section: &Section| table::against(out, section, Some(RIVAL));
    for &rows in &size.rows {
        let hidden = tensor(inputs.states(Logits::Peaked, rows)?, args.sizes.dtype)?;
        let mut contenders = inputs.contenders(&ours, rows)?;
        contenders.extend(candle_contenders(&weight, hidden)?);
        let section = time(inputs.section(&ours, rows, size.rounds), contenders, interrupt)?;
        add(record, section, out, against)?;
    }
    let rows = Rows::new(size.vocab)?;
    let logits = Tensor::from_slice(rows.logits(), size.vocab, &Device::Cpu).map_err(failed)?;
    let mut contenders = rows.contenders(&options)?;
    let mut processor = processor();
    contenders.push(Contender::new(RIVAL, move || {
        processor.sample(&logits).map(|token| _ = black_box(token)).map_err(failed)
    }));
    let section = time(rows.section(size.rounds), contenders, interrupt)?;
    add(record, section, out, against)
}
