//! The times and ratios of a GPU as text, part by part.

use super::{EXISTING, FP8, FP8_READS, LOG_Z, OURS, PORTABLE, PORTABLE_SHADOW, SHADOW};
use crate::record::{Gpu, Record};
use flash_sampling_cli::bench::record::{Entry, Section};
use flash_sampling_cli::bench::table::{BULK, CUBLAS, GREEDY, READ};
use std::io::{self, Write};

/// Writes the machine of the figures, and the timing protocol.
///
/// # Errors
/// Errors of `out`.
pub fn begin(out: &mut dyn Write, record: &Record) -> io::Result<()> {
    flash_sampling_cli::bench::table::begin(out, record)?;
    writeln!(out, "commit {}", record.commit.as_deref().unwrap_or("unknown"))?;
    if let Some(gpu) = &record.gpu {
        let driver = gpu.driver.as_deref().unwrap_or("unknown");
        writeln!(out, "{}, {} multiprocessors, driver {driver}", gpu.name, gpu.multiprocessors)?;
        describe(out, gpu)?;
    }
    writeln!(out, "{}", record.protocol.as_deref().unwrap_or_default())
}

/// Writes the times of a head, then its ratios; a section has one number of rows. `flops` is the matrix ceiling.
///
/// # Errors
/// Errors of `out`.
pub fn head(out: &mut dyn Write, sections: &[Section], flops: Option<f64>) -> io::Result<()> {
    times(out, sections)?;
    ratios(out, sections, flops)
}

/// Writes the time of the processor for each call.
///
/// # Errors
/// Errors of `out`.
pub fn end(out: &mut dyn Write, record: &Record) -> io::Result<()> {
    writeln!(out)?;
    for call in &record.calls {
        let (us, size) = (call.median * 1e6, format!("{} x {}", call.vocab, call.hidden));
        let (what, rows, calls) = (&call.what, call.rows, call.calls);
        writeln!(out, "host time of a call, {what}, {size}, rows {rows}: {us:.1} us (median of {calls})")?;
    }
    Ok(())
}

fn describe(out: &mut dyn Write, gpu: &Gpu) -> io::Result<()> {
    match (gpu.cublas, gpu.matrix_flops) {
        (Some(version), Some(flops)) => {
            writeln!(out, "cuBLAS {version}, {:.0} TFLOP/s on a square product of 8192", flops * 1e-12)
        }
        (Some(version), None) => writeln!(out, "cuBLAS {version}"),
        (None, _) => writeln!(out, "cuBLAS was not found: its contenders are left out"),
    }
}

fn name(section: &Section) -> String {
    format!("{} x {} {}", section.vocab, section.hidden.unwrap_or_default(), section.dtypes)
}

fn times(out: &mut dyn Write, head: &[Section]) -> io::Result<()> {
    let Some(first) = head.first() else { return Ok(()) };
    writeln!(out, "\n{}, microseconds, shortest (cold cache, {} rounds)", name(first), first.rounds)?;
    let every = |section: &Section| -> Vec<Entry> { section.entries.iter().chain(&section.peers).cloned().collect() };
    let all = every(first);
    let own = first.entries.len();
    let title = |i: usize, entry: &Entry| if i < own { entry.name.clone() } else { format!("peer: {}", entry.name) };
    for (i, entry) in all.iter().enumerate() {
        writeln!(out, "  {:>2}  {}", i + 1, title(i, entry))?;
    }
    write!(out, "  rows ")?;
    (1..=all.len()).try_for_each(|i| write!(out, "{i:>9}"))?;
    writeln!(out)?;
    for section in head {
        write!(out, "  {:>4} ", section.rows)?;
        let here = every(section);
        for entry in &all {
            match here.iter().find(|other| other.name == entry.name) {
                Some(entry) => write!(out, "{:>9.1}", entry.best * 1e6)?,
                None => write!(out, "{:>9}", "-")?,
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

/// The lower bound of a section's time: the longer of the read and the arithmetic.
fn ceiling(section: &Section, flops: Option<f64>) -> Option<f64> {
    let operations = 2.0 * section.vocab as f64 * section.hidden? as f64 * section.rows as f64;
    let arithmetic = flops.map_or(0.0, |flops| operations / flops);
    section.read().map(|read| read.max(arithmetic))
}

fn ratios(out: &mut dyn Write, head: &[Section], flops: Option<f64>) -> io::Result<()> {
    let Some(first) = head.first() else { return Ok(()) };
    let best = |section: &Section, name: &str| section.entry(name).map(|entry| entry.best);
    // All rivals that draw, so not cuBLAS alone. The ratio is the rival's time over ours on the same logits.
    let plain = [
        [READ, BULK, CUBLAS, GREEDY, OURS[0], OURS[1], LOG_Z].as_slice(),
        &[PORTABLE[1], PORTABLE[2], PORTABLE_SHADOW, EXISTING[0], EXISTING[1]],
        &SHADOW,
        &FP8,
        &FP8_READS,
    ]
    .concat();
    let rivals: Vec<&str> =
        first.entries.iter().map(|entry| entry.name.as_str()).filter(|name| !plain.contains(name)).collect();
    let peers: Vec<&str> = first.peers.iter().map(|entry| entry.name.as_str()).collect();
    writeln!(
        out,
        "\n{}, ratios: share of the ceiling (read or arithmetic), time over cuBLAS's matmul alone, share of the noise\n\
         (1 - greedy / time), each for {} and {}; then how many times as fast as a rival (peaked)",
        name(first),
        OURS[0],
        OURS[1]
    )?;
    write!(out, "  rows   of ceiling      over cuBLAS     noise, %    ")?;
    rivals.iter().chain(&peers).try_for_each(|rival| write!(out, "  {rival}"))?;
    writeln!(out)?;
    for section in head {
        let both = |figure: &dyn Fn(f64) -> Option<f64>, digits: usize| {
            OURS.map(|name| {
                let value = best(section, name).and_then(figure);
                value.map_or_else(|| format!("{:>7}", "-"), |value| format!("{value:>7.digits$}"))
            })
            .join(" ")
        };
        let of_ceiling = both(&|time| ceiling(section, flops).map(|ceiling| ceiling / time), 3);
        let over_cublas = both(&|time| best(section, CUBLAS).map(|cublas| time / cublas), 3);
        let noise = both(&|time| best(section, GREEDY).map(|greedy| 100.0 * (1.0 - greedy / time)), 1);
        write!(out, "  {:>4} {of_ceiling} {over_cublas} {noise}", section.rows)?;
        let peer = |name: &str| section.peers.iter().find(|entry| entry.name == name).map(|entry| entry.best);
        let others = rivals.iter().map(|name| (*name, best(section, name)));
        for (name, time) in others.chain(peers.iter().map(|name| (*name, peer(name)))) {
            let width = name.len() + 2;
            match time.zip(best(section, OURS[1])) {
                Some((rival, ours)) => write!(out, "{:>width$.2}", rival / ours)?,
                None => write!(out, "{:>width$}", "-")?,
            }
        }
        writeln!(out)?;
    }
    let ratio = |time: Option<f64>, of: Option<f64>| {
        time.zip(of).map_or_else(|| format!("{:>7}", "-"), |(time, of)| format!("{:>7.3}", time / of))
    };
    let over = |section: &Section, of: &str, name: &str| ratio(best(section, name), best(section, of));
    let mut table = |title: &str, of_row: &dyn Fn(&Section) -> Vec<String>| {
        writeln!(out, "\n{title}")?;
        head.iter().try_for_each(|section| writeln!(out, "  {:>4}  {}", section.rows, of_row(section).join(" ")))
    };
    if first.entry(SHADOW[0]).is_some() {
        let title = "with a shadow: time over the draw from the weight, and over cuBLAS's matmul alone, each for greedy,\n\
                     gaussian, peaked";
        table(title, &|section| {
            let own = [GREEDY, OURS[0], OURS[1]].into_iter().zip(SHADOW).map(|(of, name)| over(section, of, name));
            own.chain(SHADOW.map(|name| over(section, CUBLAS, name))).collect()
        })?;
    }
    if first.entry(FP8[0]).is_some() {
        let title = "a weight in fp8: share of a plain read of this weight, for greedy, gaussian, peaked, portable; then time\n\
                     over the draw from the weight in 16 bits (peaked)";
        table(title, &|section| {
            let read = FP8_READS.iter().filter_map(|name| best(section, name)).reduce(f64::min);
            let shares = FP8.map(|name| ratio(read, best(section, name)));
            shares.into_iter().chain([over(section, OURS[1], FP8[2])]).collect()
        })?;
    }
    Ok(())
}
