//! Declarations of types whose layout Rust and the kernels both state.

/// Declares types in C's layout. Asserts their size (after the name) and the offset of each field (after its type), in
/// bytes, as `FS_LAYOUT` does in the kernels. A field without an offset is padding.
macro_rules! layout {
    ($(
        $(#[$attribute:meta])*
        $visible:vis struct $type:ident = $size:literal {
            $($(#[$doc:meta])* $field_visible:vis $field:ident: $field_type:ty $(= $place:literal)?,)+
        }
    )+) => {$(
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $(#[$attribute])*
        $visible struct $type {
            $($(#[$doc])* $field_visible $field: $field_type,)+
        }
        const _: () = assert!(size_of::<$type>() == $size $($(&& core::mem::offset_of!($type, $field) == $place)?)+);
    )+};
}
pub(crate) use layout;

#[cfg(test)]
mod tests {
    use crate::compile::sources;
    use std::collections::BTreeMap;

    /// The size of a type, and the offsets of its fields.
    type Layout = (usize, BTreeMap<String, usize>);

    /// Collects layouts by name. Panics if a name occurs twice.
    fn once(stated: impl Iterator<Item = (String, Layout)>) -> BTreeMap<String, Layout> {
        let mut layouts = BTreeMap::new();
        for (name, layout) in stated {
            assert!(layouts.insert(name.clone(), layout).is_none(), "{name} is stated twice");
        }
        layouts
    }

    /// Parses the types of a `layout!` block: a line with name and size, then lines with fields and offsets, for each
    /// type.
    fn in_rust(block: &str) -> impl Iterator<Item = (String, Layout)> {
        let (block, _) = block.split_once("\n}").unwrap();
        block.split(" struct ").skip(1).map(|item| {
            let (head, fields) = item.split_once(" {\n").unwrap();
            let (name, size) = head.split_once(" = ").unwrap();
            let field = |line: &str| {
                let (field, place) = line.trim().strip_suffix(',')?.rsplit_once(" = ")?;
                let (name, _) = field.split_once(": ")?;
                Some((name.rsplit(' ').next()?.to_owned(), place.parse().ok()?))
            };
            let fields = fields.lines().filter(|line| !line.contains("//")).filter_map(field);
            (name.to_owned(), (size.parse().unwrap(), fields.collect()))
        })
    }

    /// Parses the type of an `FS_LAYOUT`: a name, a size, then pairs of field and offset.
    fn in_kernels(layout: &str) -> (String, Layout) {
        let (layout, _) = layout.split_once(");").unwrap();
        let words = layout.replace("FS_AT", "").replace(|c: char| !c.is_alphanumeric() && c != '_', " ");
        let words: Vec<_> = words.split_whitespace().collect();
        let (head, fields) = words.split_at(2);
        let number = |word: &str| word.parse().unwrap();
        let fields = fields.chunks_exact(2).map(|field| (field[0].to_owned(), number(field[1])));
        (head[0].to_owned(), (number(head[1]), fields.collect()))
    }

    #[test]
    fn both_sides_state_the_same_layouts() {
        let rust = [
            include_str!("mod.rs"),
            include_str!("columns.rs"),
            include_str!("filters.rs"),
            include_str!("fused.rs"),
            include_str!("groups.rs"),
            include_str!("logprobs.rs"),
            include_str!("peers.rs"),
            include_str!("reduction.rs"),
            include_str!("shadow.rs"),
            include_str!("stored.rs"),
            include_str!("stored_scan.rs"),
        ];
        let here = once(rust.into_iter().flat_map(|text| text.split("\nlayout! {\n").skip(1)).flat_map(in_rust));
        let texts = sources::texts().flat_map(|text| text.split("\nFS_LAYOUT(").skip(1));
        assert_eq!(here, once(texts.map(in_kernels)));
        assert!(here.len() > 50 && here["Row"].1["draw"] == 48, "{here:?}");
    }
}
