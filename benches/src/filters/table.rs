//! The table of filters, with the shortest and the median call. Calls differ, because each draws at another position,
//! and the time of a filter depends on the draw.

use super::cases::Case;
use flash_sampling_cli::bench::record::{Passes, Section};
use std::io::{self, Write};

/// Writes a section.
///
/// # Errors
/// Those of `out`.
pub fn section(out: &mut dyn Write, section: &Section) -> io::Result<()> {
    let size = section.hidden.map_or_else(|| format!("{}", section.vocab), |h| format!("{} x {h}", section.vocab));
    writeln!(
        out,
        "\n{}: {} at once, {size} {}, threads {}, best and median of {}",
        section.what,
        section.rows,
        section.dtypes,
        section.threads.unwrap_or(1),
        section.rounds
    )?;
    let names = ("ms", "/ plain", "median", "/ plain", "one pass", "most");
    writeln!(
        out,
        "  {:<28} {:>10} {:>8} {:>10} {:>8} {:>10} {:>6}",
        "", names.0, names.1, names.2, names.3, names.4, names.5
    )?;
    let plain = section.entry(Case::Plain.name());
    let ratio =
        |time: f64, plain: Option<f64>| plain.map_or_else(|| "-".into(), |plain| format!("{:.3}", time / plain));
    for entry in &section.entries {
        let by_best = ratio(entry.best, plain.map(|plain| plain.best));
        let by_median = ratio(entry.median, plain.map(|plain| plain.median));
        let (one, most) = entry.passes.map_or_else(
            || ("-".into(), "-".into()),
            |passes| (format!("{:.2}%", 100.0 * passes.share_of_one_pass()), passes.most.to_string()),
        );
        let (best, median) = (entry.best * 1e3, entry.median * 1e3);
        writeln!(
            out,
            "  {:<28} {best:>10.3} {by_best:>8} {median:>10.3} {by_median:>8} {one:>10} {most:>6}",
            entry.name
        )?;
    }
    for peer in &section.peers {
        write!(out, "  {:<46} {:>10.3} {:>10.3}", peer.name, peer.best * 1e3, peer.median * 1e3)?;
        match section.entries.iter().find(|entry| peer.name.ends_with(&format!(": {}", entry.name))) {
            Some(ours) => writeln!(out, "  {:.2} and {:.2} of ours", peer.best / ours.best, peer.median / ours.median)?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

/// Writes a section whose calls make one pass. Undecided rows need a second pass, which the times exclude. If most rows
/// are undecided, a section of whole calls follows.
///
/// # Errors
/// Those of `out`.
pub fn of_one_pass(out: &mut dyn Write, timed: &Section) -> io::Result<()> {
    section(out, timed)?;
    let passes = || timed.entries.iter().filter_map(|entry| entry.passes);
    if !passes().any(|passes| passes.most > 1) {
        return Ok(());
    }
    let follows = passes().any(Passes::is_mostly_undecided);
    let but = if follows { ", but in those of the whole calls below, where most rows are left" } else { "" };
    writeln!(out, "  (the second pass of undecided rows is not in these times{but})")
}

/// Writes the legend of the columns.
///
/// # Errors
/// Those of `out`.
pub fn end(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\ncolumns\n  \
         ms, / plain      time of the shortest call, and over that of the plain draw\n  \
         median, / plain  the same of the median call\n  \
         one pass         share of the rows that one pass decides\n  \
         most             the most passes of a row"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_cli::bench::timing::Timing;

    #[test]
    fn whole_calls_follow_where_one_pass_leaves_half_of_the_rows() {
        let note = |passes: [u32; 4]| {
            let mut timed = Section::of_logits("a section", 8, 1);
            timed.fill(["top-k 20"].into_iter(), &[Timing { best: 1.0, median: 1.0 }]);
            let mut seen = Passes::default();
            passes.into_iter().for_each(|passes| seen.add(passes));
            timed.entries[0].passes = Some(seen);
            let mut out = Vec::new();
            of_one_pass(&mut out, &timed).unwrap();
            let text = String::from_utf8(out).unwrap();
            (text.contains("(the second pass"), text.contains("whole calls below"))
        };
        assert_eq!(note([1, 1, 1, 1]), (false, false));
        assert_eq!(note([1, 1, 1, 2]), (true, false));
        assert_eq!(note([1, 1, 2, 2]), (true, true));
    }
}
