//! The table of `bench --pipeline`.

use super::cases::Case;
use crate::bench::record::{Certified, Record, Section};
use std::io::{self, Write};

fn section(out: &mut dyn Write, section: &Section, rival: Option<&str>) -> io::Result<()> {
    let size = section.hidden.map_or_else(|| format!("{}", section.vocab), |h| format!("{} x {h}", section.vocab));
    writeln!(
        out,
        "\n{}: {} at once, {size} {}, {} threads, best of {}",
        section.what,
        section.rows,
        section.dtypes,
        section.threads.unwrap_or(1),
        section.rounds
    )?;
    let over = rival.map_or_else(String::new, |rival| format!("{rival} / time"));
    writeln!(out, "  {:<28} {:>10} {:>8} {:>10} {:>6}  {over}", "", "ms", "/ plain", "one pass", "most")?;
    let best = |name: &str| section.entry(name).map(|entry| entry.best);
    let plain = best(Case::Plain.name());
    for entry in &section.entries {
        let ratio = plain.map_or_else(|| "-".into(), |plain| format!("{:.3}", entry.best / plain));
        let (one, most) = entry.passes.map_or_else(
            || ("-".into(), "-".into()),
            |passes| (format!("{:.2}%", 100.0 * passes.certified()), passes.most.to_string()),
        );
        let over = rival.and_then(best).map_or_else(String::new, |rival| format!("{:.2}", rival / entry.best));
        writeln!(out, "  {:<28} {:>10.3} {ratio:>8} {one:>10} {most:>6}  {over}", entry.name, entry.best * 1e3)?;
    }
    for peer in &section.peers {
        write!(out, "  {:<46} {:>10.3}", peer.name, peer.best * 1e3)?;
        match section.entries.iter().find(|entry| peer.name.ends_with(&format!(": {}", entry.name))) {
            Some(ours) => writeln!(out, "  {:.2} of ours", peer.best / ours.best)?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

/// Writes all sections, and how many rows one pass decides. `rival` is a contender that the last column compares with.
///
/// # Errors
/// Those of `out`.
pub fn write(out: &mut dyn Write, record: &Record, rival: Option<&str>) -> io::Result<()> {
    writeln!(out, "{}; {}; commit {}", record.machine, record.when, record.commit.as_deref().unwrap_or("unknown"))?;
    record.sections.iter().try_for_each(|s| section(out, s, rival))?;
    if record.certified.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nrows that one pass decides, and the most passes of a row")?;
    for Certified { rows, case, passes } in &record.certified {
        let share = 100.0 * passes.certified();
        writeln!(out, "  {rows:<18} {case:<22} {share:>7.2}% of {:<6} {}", passes.rows, passes.most)?;
    }
    Ok(())
}
